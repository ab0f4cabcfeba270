"""What the settings in verl's config become, and what of verl's they refuse, by either trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils.config import validate_config

from r3.config import load_config
from r3.errors import ConfigError
from r3.integrations.verl import ESTIMATOR
from r3.integrations.verl.config import settings_of
from r3.integrations.verl.core import Core
from r3.method.presets import METHODS
from tests.integrations.verl.running import TRAINERS, taken, verl_config
from tests.train.tiny import ROOT

OFFERED = {"grpo", "maxrl", "reinforce++", "r3", "r3-paper", "r3-no-replay", "r3-no-reflection", "r3-no-ranking"}


def composed_recipe(recipe: str, *more: str) -> Any:
    """A recipe as run.sh gives it to verl, found valid by verl and by the plugin."""
    with initialize_config_dir(str(ROOT / "recipes/verl"), version_base=None):
        config = compose(recipe, ["data.train_files=train.parquet", "data.val_files=heldout.parquet", *more])
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    settings = taken(config, "v0")
    assert settings == taken(config, "v1")
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
    assert taken(config).reward.length_limit == 32768


def test_the_recipe_for_one_card_is_that_of_our_loop() -> None:
    config = composed_recipe("gsm8k-smollm2", "actor_rollout_ref.model.path=model", "trainer.n_gpus_per_node=1")
    ours, settings = load_config(ROOT / "recipes/gsm8k-smollm2.yaml"), taken(config)
    assert config.data.train_batch_size == ours.train.queries_per_step
    assert config.data.max_response_length == ours.rollout.max_tokens
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature) == (ours.rollout.group_size, ours.rollout.temperature)
    assert config.actor_rollout_ref.actor.optim.lr == ours.train.learning_rate
    assert settings.reward == ours.reward
    assert settings.replay == ours.method.replay
    assert settings.ranking == ours.method.ranking.model_copy(update={"limit": ours.rollout.max_tokens})
    # A run of few epochs: reflection as early as the paper has it; beside a query's group, since verl's have one size.
    changed = {"from_epoch": 2, "budget": "extra"}
    assert settings.reflection == ours.method.reflection.model_copy(update=changed)


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
        ("trainer.critic_warmup=2", "trainer.critic_warmup=0"),
        ("+r3_method.objective.clip_high=0.3", "clip_ratio_high"),
        ("+r3_method.repaly.k=3", "r3_method.repaly: no such setting; did you mean replay?"),
        ("+r3_method.replay.kk=3", r"r3_method.replay.kk: no such setting; did you mean replay.k\?"),
        ("+r3_method.query_key=uid", "r3_method.query_key: Input should be 'index' or 'prompt'"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_fix(tmp_path: Path, override: str, fix: str) -> None:
    for trainer in TRAINERS:
        with pytest.raises(ConfigError, match=fix):
            taken(verl_config(tmp_path, override), trainer)


@pytest.mark.parametrize(
    ("trainer", "override", "fix"),
    [
        ("v1", "trainer.v1.sampler.sync_refill_failed_groups=true", "sync_refill_failed_groups=false"),
        ("v1", "skip.rollout_tq.enable=true", "skip.rollout_tq.enable=false"),
        ("v0", "skip.rollout.enable=true", "skip.rollout.enable=false"),
        ("v0", "trainer.balance_batch=false", "trainer.balance_batch=true"),
        ("v0", "data.gen_batch_size=2", "leave data.gen_batch_size unset, or at 4"),
        ("v0", "actor_rollout_ref.actor.use_prefix_grouper=true", "use_prefix_grouper=false"),
    ],
)
def test_what_one_trainer_cannot_do_is_refused_there_alone(
    tmp_path: Path, trainer: str, override: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix):
        taken(verl_config(tmp_path, override), trainer)
    taken(verl_config(tmp_path, override), {"v1": "v0", "v0": "v1"}[trainer])


@pytest.mark.parametrize(
    ("overrides", "rows", "expected"),
    [
        (["actor_rollout_ref.actor.use_dynamic_bsz=true"], 17, 20),  # whole prompts' worth, as many rows a worker
        (["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_mini_batch_size=1"], 17, 32),
        ([], 17, 24),  # micro-batches of 4 on each of two workers
        (["actor_rollout_ref.actor.ppo_mini_batch_size=2"], 17, 32),
        (["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3"], 17, 24),
        (["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=5"], 17, 40),
    ],
)
def test_a_batch_is_filled_up_to_what_verls_workers_can_divide(
    tmp_path: Path, overrides: list[str], rows: int, expected: int
) -> None:
    config = verl_config(tmp_path, *overrides)
    core = Core(config, taken(config))
    assert core.filled_up(rows, 2) == expected
    minibatches = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert core.minibatch(expected) * config.actor_rollout_ref.rollout.n * minibatches == expected


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("preset", METHODS)
def test_every_preset_is_offered_or_refused_by_name(tmp_path: Path, preset: str, trainer: str) -> None:
    config = verl_config(tmp_path, f"+r3_method.name={preset}")
    if preset in OFFERED:
        assert taken(config, trainer).name == preset
    else:
        with pytest.raises(ConfigError, match=rf"(?i)\b{preset}\b"):
            taken(config, trainer)
    assert f"`{preset}`" in (ROOT / "docs/verl.md").read_text()


@pytest.mark.parametrize("preset", ["grpo", "r3", "r3-paper", "r3-no-replay", "r3-no-reflection", "r3-no-ranking"])
def test_presets(tmp_path: Path, preset: str) -> None:
    settings = taken(verl_config(tmp_path, f"+r3_method.name={preset}"))
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
