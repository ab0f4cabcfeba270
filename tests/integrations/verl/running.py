"""verl's commands on a local Ray with its own FSDP2 workers, on the CPU; recorded answers in the place of vLLM."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from r3.integrations.verl import V0
from r3.integrations.verl.data import write
from r3.method.mixed import StepResult
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
        "reward.custom_reward_function.path": ROOT / "tests/integrations/verl/judging.py",
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
