"""verl's commands on a local Ray with its own FSDP2 workers, on the CPU; recorded answers in the place of vLLM.

With verl's config for tests, R³'s settings as verl's trainers take them, and what is checked of a run, whichever of its
trainers it was in.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from r3.buffer import SampleBuffer
from r3.integrations.verl import V0
from r3.integrations.verl.config import VerlSettings, checked, conflicts_of_v0, conflicts_of_v1
from r3.integrations.verl.data import write
from r3.method.mixed import StepResult
from r3.method.objective import ORIGINS, TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from r3.samples import Query
from tests.integrations import contract
from tests.train.tiny import ROOT, save_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HERE = "tests.integrations.verl"
Trainer = Literal["v1", "v0"]
ONE_WORKER = {"trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}
"""Where it does not matter how many workers the policy is sharded over."""
COMMANDS = {"v1": "verl.trainer.main_ppo", "v0": V0}


def prepare(folder: Path, queries: Sequence[Query] | None = None, save: Callable[[Path], Path] = save_model) -> None:
    """The contract's model and queries (or these), as verl reads them."""
    save(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    write(queries or contract.queries(), folder / "train.parquet", "contract", "train")


def overrides(folder: Path, **more: Any) -> list[str]:
    """The contract as overrides of verl's config; `more` uses __ for the dot."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    own = {f"+r3_method.reflection.{name}": f"'{value}'" for name, value in contract.REFLECTION.items()}
    settings = {
        **own,
        "+r3_method.name": "r3-paper",
        "+r3_method.reflection.max_prompt_tokens": 200,
        "+r3_method.ranking.peak_fraction": 0.25,
        "+r3_method.reward.length_limit": contract.LENGTH_LIMIT,
        "+r3_method.seed": contract.SEED,
        "trainer.v1.trainer_mode": "r3_sync",
        "algorithm.adv_estimator": "r3_mixed_group",
        "reward.reward_manager.name": "r3_reward",
        "reward.custom_reward_function.path": ROOT / "tests/train/tiny.py",
        "reward.custom_reward_function.name": "judged",
        "reward.num_workers": 1,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": contract.BATCH,
        "data.max_prompt_length": 200,
        "data.max_response_length": contract.LIMIT,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": folder / "model",
        f"{actor}.ppo_mini_batch_size": contract.BATCH,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.use_kl_loss": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-12,  # as in the other trainers of the contract: the policy stands still
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        "actor_rollout_ref.model.use_remove_padding": False,  # it needs flash-attn
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{rollout}.n": contract.GROUP,
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 2,  # one server for both workers
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 4,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.default_agent_loop": "recorded",
        "trainer.total_epochs": contract.EPOCHS,
        "trainer.n_gpus_per_node": 2,
        "trainer.nnodes": 1,
        "trainer.val_before_train": False,
        "trainer.logger": "[file]",
        "trainer.project_name": "r3",
        "trainer.experiment_name": "contract",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.save_freq": 4,
        "ray_kwargs.ray_init.num_cpus": 8,
        "+ray_kwargs.ray_init.num_gpus": 2,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def run(
    folder: Path,
    trainer: Trainer = "v1",
    failing: dict[str, list[int]] | None = None,
    *,
    external: str = "standins",
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """verl's command, for real; what it writes lands in `folder`.

    `failing`: sessions, by prompt, of the third step. `external`: the module here that every process of verl's loads.
    """
    folder.mkdir(exist_ok=True)
    started = len(list(folder.glob("metrics-*.jsonl")))
    environment = {
        **os.environ,
        "RAY_worker_niceness": "0",  # Ray's 15 would starve it beside any other work on the machine
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),  # this tree, wherever another is installed
        "PYTHONWARNINGS": "ignore",
        "R3_TEST_FOLDER": str(folder),
        "R3_TEST_FAILING": json.dumps(failing or {}),
        "VERL_USE_EXTERNAL_MODULES": f"{HERE}.{external}",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the engine that verl has for cards
        "VERL_FILE_LOGGER_PATH": str(folder / f"metrics-{started}.jsonl"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # nothing here is worth compiling
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, "-m", COMMANDS[trainer], *overrides(folder, **more)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """What verl logged at each step."""
    logged: dict[int, dict[str, float]] = defaultdict(dict)
    for file in sorted(folder.glob("metrics-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            logged[line["step"]] |= line["data"]
    logged.pop(0, None)  # verl's validation before the first step
    return dict(logged)


def steps(folder: Path) -> dict[int, StepResult]:
    """What the method decided at each step."""
    files = {int(path.stem.split("-")[1]): path for path in folder.glob("step-*.pkl")}
    return {number: pickle.loads(files[number].read_bytes()) for number in sorted(files)}


@cache
def composed() -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides(Path("folder")))


def verl_config(folder: Path, *more: str) -> Any:
    """verl's config with the contract's overrides and more of them, without composing it anew (a second each time)."""
    config = copy.deepcopy(composed())
    for override in (f"actor_rollout_ref.model.path={folder / 'model'}", *more):
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


TRAINERS = {"v1": conflicts_of_v1, "v0": conflicts_of_v0}


def taken(config: Any, trainer: str = "v1") -> VerlSettings:
    """The settings as one of verl's trainers takes them."""
    return checked(config, TRAINERS[trainer](config))


def updates(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The mini-batches of each step, those of both workers together."""
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("update-*.pkl")):
        step, number, _ = map(int, path.stem.split("-")[1:])
        part = pickle.loads(path.read_bytes())
        one = found[step].setdefault(number, {**part, "rows": []})
        one["rows"] += part["rows"]
    return found


def samples(path: Path) -> list[tuple[Any, ...]]:
    """All samples of a buffer by id, as comparable values."""
    with SampleBuffer.open_reader(path) as buffer:
        found = [one for _, one in sorted(buffer.find(range(1, 1000)).items())]
    return [
        (s.id, s.query_id, s.tokens.tobytes(), s.logprobs.tobytes(), s.outcome, s.step, s.reward, s.context.kind)
        for s in found
    ]


def moved(folder: Path) -> float:
    """How far the weights went from the first to the last that the server got."""
    first, last = (torch.load(folder / f"weights-{number}.pt") for number in (0, 7))
    return max(float((last[key] - first[key]).abs().max()) for key in first)


def check_number_of_updates(folder: Path, expected: int) -> None:
    """It stays though the batch grows."""
    grown = 0
    for parts in updates(folder).values():
        assert len(parts) == expected
        sizes = {part["mini_batch_size"] for part in parts.values()}
        assert [len(part["rows"]) for part in parts.values()] == [*sizes] * expected
        grown += min(sizes) > contract.BATCH * contract.GROUP // expected
    assert grown > 0


def check_members(folder: Path) -> None:
    """Every member of a mixed group is trained once."""
    for number, parts in updates(folder).items():
        trained = [
            (row["prompts"], row["responses"])
            for part in parts.values()
            for row in part["rows"]
            if any(row["advantages"]) and any(row["response_mask"])
        ]
        for weighted in steps(folder)[number].weighted:
            key = (weighted.prompt.tolist(), weighted.sample.tokens.tolist())
            if key in trained:
                trained.remove(key)
            else:
                assert weighted.origin == "replayed"  # gated to silence, token by token
        assert not trained


def check_log_probs(folder: Path) -> None:
    """The log-probs that verl's sharded workers had for every row, by a plain model with the weights they sent off."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sent = {number: torch.load(folder / f"weights-{number}.pt") for number in range(8)}
    for number, parts in updates(folder).items():
        model.load_state_dict(sent[number - 1])
        for row in (row for part in parts.values() for row in part["rows"]):
            ids, length = torch.tensor([row["prompts"] + row["responses"]]), len(row["responses"])
            with torch.no_grad():
                log_TV = model(ids).logits[0].log_softmax(-1)[-length - 1 : -1]
            expected = log_TV.gather(1, ids[0, -length:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row["old_log_probs"]), expected, rtol=0, atol=1e-4)


def methods_loss(result: StepResult, rows: list[dict[str, Any]]) -> float:
    """The same by r3's objective, from what was decided and the log-probs that verl computed."""
    proximal = {(tuple(r["prompts"]), tuple(r["responses"])): torch.tensor(r["old_log_probs"]) for r in rows}
    weighted = result.weighted
    old = [proximal[tuple(w.prompt.tolist()), tuple(w.sample.tokens.tolist())] for w in weighted]
    drawn = [
        torch.tensor(w.sample.logprobs) if w.origin == "replayed" else old[i] for i, w in enumerate(weighted)
    ]  # π_prox is π_behave for fresh samples; verl has its own correction for its engines' differences
    batch = TokenBatch(
        sequence_T=torch.cat([torch.full((len(o),), i) for i, o in enumerate(old)]),
        behaviour_T=torch.cat(drawn),
        advantage_T=torch.cat([torch.from_numpy(w.advantage_T) for w in weighted]),
        weight_S=torch.tensor([w.weight for w in weighted]),
        origin_S=torch.tensor([ORIGINS.index(w.origin) for w in weighted]),
        other_context_S=torch.tensor([w.other_context for w in weighted]),
        proximal_T=torch.cat(old),
    )
    return float(policy_loss(torch.cat(old), batch, ObjectiveSettings()).loss)
