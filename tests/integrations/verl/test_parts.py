"""The plugin's parts against verl's real ones: its config, its data set, its reward workers' calls, plugin loading."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset

from r3.algorithm import Prompt
from r3.config import load_config
from r3.errors import ConfigError
from r3.integrations.common.buffer_copies import FILE, prune_copies
from r3.integrations.common.groups import Answer
from r3.integrations.verl import ESTIMATOR, transfer
from r3.integrations.verl.__main__ import main
from r3.integrations.verl.config import checked, settings_of
from r3.integrations.verl.dataset import Templated, check_ids, query_of
from r3.integrations.verl.reward import R3RewardManager
from r3.integrations.verl.trainer import R3Trainer, _Batch
from r3.method.reflection import plain_prompt
from r3.samples import Context, Query
from tests.integrations.verl.running import overrides, prepare
from tests.tokenizing import char_tokenizer, chat_tokenizer
from tests.train.tiny import ROOT, run_r3


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


# ---------------------------------------------------------------- config


def composed_recipe(recipe: str, *more: str) -> Any:
    """A recipe as run.sh gives it to verl, found valid by verl and by the plugin."""
    with initialize_config_dir(str(ROOT / "recipes/verl"), version_base=None):
        config = compose(recipe, ["data.train_files=train.parquet", "data.val_files=heldout.parquet", *more])
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    settings = checked(config)
    assert (settings.replay.enabled, settings.reflection.enabled, settings.ranking.enabled) == (True, True, True)
    assert settings.objective.normalise == "sequence"
    room = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len == room
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= room
    return config


@pytest.mark.parametrize("recipe", ["deepscaler-1.5b", "deepscaler-7b"])
def test_recipes_have_the_papers_numbers(recipe: str) -> None:
    config = composed_recipe(recipe)
    assert config.data.max_response_length == 8192
    assert checked(config).reward.length_limit == 32768


def test_the_recipe_for_one_card_is_that_of_our_loop() -> None:
    config = composed_recipe("gsm8k-smollm2", "actor_rollout_ref.model.path=model", "trainer.n_gpus_per_node=1")
    ours, settings = load_config(ROOT / "recipes/gsm8k-smollm2.yaml"), checked(config)
    assert config.data.train_batch_size == ours.train.queries_per_step
    assert config.data.max_response_length == ours.rollout.max_tokens
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature) == (ours.rollout.group_size, ours.rollout.temperature)
    assert config.actor_rollout_ref.actor.optim.lr == ours.train.learning_rate
    assert settings.reward == ours.reward
    assert (settings.replay, settings.ranking) == (ours.method.replay, ours.method.ranking)
    # A run of few epochs: reflection as early as the paper has it.
    assert settings.reflection == ours.method.reflection.model_copy(update={"from_epoch": 2})


def test_every_recipe_is_named_where_a_user_gets_the_name_wrong() -> None:
    said = (ROOT / "recipes/verl/run.sh").read_text()
    names = {path.stem for path in (ROOT / "recipes/verl").glob("*.yaml")} - {"r3"}
    assert len(names) == 3
    assert all(said.count(name) >= 2 for name in names)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("+r3_method.name=dapo", r"\+r3_method.resample=off"),
        ("+r3_method.name=rl-zvp", "are of r3 train alone"),
        ("+r3_method.name=polaris", "copies"),
        ("+r3_method.name=prompt-replay", "verl's sampler does"),
        ("+r3_method.name=exgrpo", "verl's sampler does"),
        ("+r3_method.name=sdpo", "teacher's prompt"),
        ("+r3_method.name=luffy", "rows of the data"),
        ("+r3_method.name=sage", "verl's step generates once"),
        ("+r3_method.name=critique", "verl's step generates once"),
        ("+r3_method.replay.when=always", "are of r3 train alone"),
        ("+r3_method.reflection.budget=shared", "groups have one size"),
        ("+r3_method.replay.ratio=first_replayed", r"replay\.max_repeats"),
        ("+r3_method.buffer.successes_from=runs/first", "is of r3 train alone"),
        ("+r3_method.name=gspo", "the surrogate is verl's to set"),
        ("+algorithm.filter_groups={enable: true, metric: acc}", "algorithm.filter_groups.enable=false"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=r3_mixed_group"),
        ("reward.reward_manager.name=naive", "reward.reward_manager.name=r3_reward"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable=false"),
        ("critic.enable=true", "leave critic.enable unset"),
        ("algorithm.use_kl_in_reward=true", "use_kl_loss"),
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode=false"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rollout_rs=null"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "use one of vanilla, gspo, cispo"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "use one of token-mean"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor"),
        ("data.max_prompt_length=100", r"\+r3_method.reflection.max_prompt_tokens=100"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "multi_turn.enable=false"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "sync_refill_failed_groups=false"),
        ("skip.rollout_tq.enable=true", "skip.rollout_tq.enable=false"),
        ("+r3_method.objective.clip_high=0.3", "clip_ratio_high"),
        ("+r3_method.repaly.k=3", "r3_method.repaly: no such setting; did you mean replay?"),
        ("+r3_method.replay.kk=3", r"r3_method.replay.kk: no such setting; did you mean replay.k\?"),
        ("+r3_method.query_key=uid", "r3_method.query_key: Input should be 'index' or 'prompt'"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_fix(tmp_path: Path, override: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        checked(verl_config(tmp_path, override))


@pytest.mark.parametrize("preset", ["grpo", "r3", "r3-paper", "r3-no-replay", "r3-no-reflection", "r3-no-ranking"])
def test_presets(tmp_path: Path, preset: str) -> None:
    settings = checked(verl_config(tmp_path, f"+r3_method.name={preset}"))
    on = {"replay": settings.replay.enabled, "reflection": settings.reflection.enabled}
    on["ranking"] = settings.ranking.enabled
    off = set(on) if preset == "grpo" else {preset.removeprefix("r3-no-")}
    assert {name for name, enabled in on.items() if not enabled} == off & set(on)


@pytest.mark.parametrize(
    ("override", "normalise", "ratio", "constant"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "token", "token", None),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "constant", "token", 1),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "sequence", "sequence", None),
    ],
)
def test_denominators_are_verls(
    tmp_path: Path, override: str, normalise: str, ratio: str, constant: int | None
) -> None:
    objective = settings_of(verl_config(tmp_path, override)).objective
    assert (objective.normalise, objective.ratio) == (normalise, ratio)
    assert constant is None or objective.constant_length == constant


def test_the_estimator_is_for_the_trainer_alone() -> None:
    with pytest.raises(RuntimeError, match="trainer_mode=r3_sync"):
        get_adv_estimator_fn(ESTIMATOR)(token_level_rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2))


# ---------------------------------------------------------------- data


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    lines = [f'{{"id": "q{i}", "problem": "What is {i}+{i}?", "answer": "{2 * i}"}}' for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text("task: {name: file, heldout: 2}\n")
    run_r3("data", "verl", tmp_path / "recipe.yaml", f"task.path={tmp_path / 'sums.jsonl'}", "--to", tmp_path / "data")
    return tmp_path / "data"


def dataset(file: Path, folder: Path) -> RLHFDataset:
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(folder / "cache")})
    return RLHFDataset(str(file), chat_tokenizer(), config)


def test_exported_tasks_are_read_by_verl(exported: Path, tmp_path: Path) -> None:
    train, heldout = (dataset(exported / f"{name}.parquet", tmp_path) for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (4, 2)
    check_ids(train, "index")
    row = train[1]
    assert (row["index"], row["reward_model"]["ground_truth"]) == ("q1", "2")
    assert not {train[i]["index"] for i in range(4)} & {heldout[i]["index"] for i in range(2)}
    # What verl asks is what r3 train asks, under the same id.
    query = query_of(row["raw_prompt"], row["index"], "index")
    assert query.id == "q1"
    asked = chat_tokenizer().apply_chat_template(row["raw_prompt"], tokenize=False, add_generation_prompt=True)
    assert "What is 1+1?" in asked
    expected = chat_tokenizer().encode(asked, add_special_tokens=False)
    assert plain_prompt(query, Templated(chat_tokenizer(), {})).tolist() == expected


def test_rows_that_would_share_a_history_are_refused(exported: Path, tmp_path: Path) -> None:
    data = dataset(exported / "train.parquet", tmp_path)
    data.dataframe = data.dataframe.map(lambda row: {"extra_info": {**row["extra_info"], "index": "same"}})
    with pytest.raises(ConfigError, match=r"not unique, e\.g\. 'same': .*query_key=prompt"):
        check_ids(data, "index")
    check_ids(data, "prompt")
    data.dataframe = data.dataframe.remove_columns("extra_info")
    with pytest.raises(ConfigError, match=r"have no extra_info\.index"):
        check_ids(data, "index")
    prompts = [data[i]["raw_prompt"] for i in (0, 1, 0)]
    ids = [query_of(prompt, 0, "prompt").id for prompt in prompts]
    assert ids[0] == ids[2] != ids[1]


def test_template_options_reach_reflection_prompts() -> None:
    query = query_of([{"role": "user", "content": "?"}], 1, "index")
    prompt = plain_prompt(query, Templated(chat_tokenizer(), {"chat_template": "no turns"}))
    assert prompt.tolist() == chat_tokenizer().encode("no turns", add_special_tokens=False)


# ---------------------------------------------------------------- rewards


def answer(text: str, *, ended: bool = True, gold: str = "1/2") -> DataProto:
    """One answer as an agent loop hands it to the reward worker."""
    tokens = char_tokenizer().encode(text) + [char_tokenizer().eos_token_id] * ended
    responses = torch.tensor([tokens])
    columns = {"prompts": torch.ones(1, 3, dtype=torch.long), "responses": responses}
    columns["attention_mask"] = torch.ones(1, 3 + len(tokens), dtype=torch.long)
    given = {"data_source": "maths", "reward_model": {"ground_truth": gold}, "extra_info": {"index": "q"}}
    return DataProto(
        batch=TensorDict(columns, batch_size=1),
        non_tensor_batch={name: np.array([value], dtype=object) for name, value in given.items()},
    )


def test_rewards_are_the_papers_with_token_lengths(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = verl_config(tmp_path, "reward.custom_reward_function.path=null", "++r3_method.reward.length_limit=100")

    async def judge() -> list[dict[str, Any]]:
        manager = R3RewardManager(config, char_tokenizer(), None)
        texts = [r"so \boxed{0.5}", r"so \boxed{2}", "no box"]
        try:
            told = [await manager.run_single(answer(text)) for text in texts]
            return [*told, await manager.run_single(answer(texts[0], ended=False))]
        finally:
            manager.verifier.close()

    right, wrong, boxless, cut = asyncio.run(judge())
    assert right["reward_score"] == pytest.approx(1 + 1 - 15 / 100)  # 14 characters and the end
    assert right["reward_extra_info"] == {"acc": 1, "truncated": 0, "reward_correct": 1, "reward_length": 1 - 15 / 100}
    assert [one["reward_score"] for one in (wrong, boxless, cut)] == [0, 0, 0]
    assert [one["reward_extra_info"]["truncated"] for one in (wrong, boxless, cut)] == [0, 0, 1]


@pytest.mark.parametrize("told", [0.7, {"score": 0.7}])
def test_a_judge_of_the_users_own(tmp_path: Path, told: Any) -> None:
    prepare(tmp_path)
    seen: list[dict[str, Any]] = []

    async def judge(right_above: float) -> float:
        config = verl_config(tmp_path, f"+r3_method.right_above={right_above}")
        manager = R3RewardManager(config, char_tokenizer(), lambda **given: seen.append(given) or told)
        return float((await manager.run_single(answer("text", gold="g")))["reward_extra_info"]["acc"])

    assert (asyncio.run(judge(0.5)), asyncio.run(judge(0.8))) == (1.0, 0.0)
    assert {k: seen[0][k] for k in ("solution_str", "ground_truth")} == {"solution_str": "text", "ground_truth": "g"}


# ---------------------------------------------------------------- what the trainer refuses on the way


def given(prompt: list[int]) -> Answer:
    ids = np.asarray(prompt, np.int32)
    return Answer(ids, np.asarray([5], np.int32), np.zeros(1, np.float32), None, False, True, {"correct": 1.0})


def test_a_reflection_prompt_that_verl_cut_stops_the_run() -> None:
    trainer = object.__new__(R3Trainer)
    query, shown = Query("q", "?"), Context("reflection", 1)
    plain = Prompt(query, 2, 0, np.array([1, 2]), "?")
    asked = {"plain": plain, "reflecting": Prompt(query, 2, 0, np.array([3, 4, 5]), "??", shown, plain.tokens)}
    answers = {"plain": {"plain_0_0": given([1, 2])}, "reflecting": {"reflecting_0_0": given([3, 4, 5])}}
    trainer._r3 = _Batch(asked, {})
    trainer._take_answers(answers)
    assert [prompt.context.kind for prompt, _ in trainer._r3.answers] == ["plain", "reflection"]
    asked["reflecting"] = replace(asked["reflecting"], tokens=np.array([2, 3, 4, 5]))
    with pytest.raises(ValueError, match=r"cut a reflection prompt of 4 tokens .* data\.max_prompt_length"):
        trainer._take_answers(answers)


def test_answers_of_another_reward_manager_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without reward_correct.* reward\.reward_manager\.name=r3_reward"):
        transfer._answer(
            np.ones(1, np.int32), np.ones(1, np.int32), None, {"reward_extra_info": {"acc": 1, "truncated": 0}}
        )


# ---------------------------------------------------------------- loading, checkpoints


def python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT)


def test_the_check_says_what_verl_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().out == "verl 0.9.1 knows r3_sync, r3_mixed_group and r3_reward\n"
    done = python("-m", "r3.integrations.verl", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in done.stderr


@pytest.mark.parametrize("old", [True, False], ids=["with the class that verl patches", "without it"])
def test_a_trl_that_stops_verls_workers_is_told_of(tmp_path: Path, old: bool) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("class AutoModelForCausalLMWithValueHead: ...\n" if old else "")
    done = python("-m", "r3.integrations.verl", PYTHONPATH=os.pathsep.join([str(tmp_path), *_paths()]))
    assert done.returncode == (0 if old else 1), done.stderr
    assert old or "pip uninstall trl" in done.stderr


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def test_a_plugin_that_does_not_load_shouts() -> None:
    done = python("-c", "import r3.integrations.verl as v; v.TESTED = ('0.1',); import verl; print('went on')")
    assert done.stdout == "went on\n"  # as verl would have it
    assert "its verl plugin did not load, so verl does not know trainer_mode=r3_sync" in done.stderr
    assert "pip install" in done.stderr


def test_copies_go_with_the_checkpoints_that_verl_thins_out(tmp_path: Path) -> None:
    for name in ("global_step_2", "global_step_4"):
        (tmp_path / name / "actor").mkdir(parents=True)
        (tmp_path / name / FILE).touch()
    (tmp_path / "global_step_2" / "actor").rmdir()
    prune_copies(str(tmp_path), "global_step_*", needs="actor")
    assert [path.parent.name for path in tmp_path.glob(f"*/{FILE}")] == ["global_step_4"]
