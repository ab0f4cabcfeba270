"""`++r3_method.*` in verl's config: the method's settings, checked alone and against verl's; the run as recorded.

What verl has a setting for stays verl's: the clip (`clip_ratio_low`, `clip_ratio_high`), the loss and its denominators
(`policy_loss.loss_mode`, `loss_agg_mode`), the KL (`use_kl_loss`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from r3.config import BufferSettings, validate_as
from r3.errors import ConfigError
from r3.integrations.common import Described, of_one_size
from r3.integrations.verl import ESTIMATOR, KEY, REWARD
from r3.method.settings import MethodSettings, RewardSettings

OBJECTIVE_OF_R3 = {"importance_cap", "ratio_gate", "mean_over"}
LOSSES = ("vanilla", "gspo", "cispo")
# Methods that are a surrogate more than anything else, which here is verl's to set, whatever the name says.
SURROGATES = ("dr_grpo", "gspo", "cispo", "rloo", "justrl")
# How verl's aggregations weigh a token, in the words of r3's objective.
NORMALISE = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}


class BufferPlace(BufferSettings):
    """The sample buffer S: its limits and its file."""

    path: str | None = None
    """Its file, on a local disk of the node that runs the trainer; <trainer.default_local_dir>/r3_buffer.sqlite."""


class VerlSettings(MethodSettings):
    """The method and what the plugin needs beside it."""

    reward: RewardSettings = Field(default_factory=RewardSettings)
    buffer: BufferPlace = Field(default_factory=BufferPlace)
    query_key: Literal["index", "prompt"] = "index"
    """What a query's history is kept under: extra_info.index, which must be unique, or a hash of the prompt."""
    max_reflections: int | None = Field(None, ge=1)
    """Most reflection prompts that join one batch; None for no limit."""
    right_above: float = 0.5
    """With reward.custom_reward_function: an answer is right if its score is above this."""
    rollouts_every: int = Field(1, ge=0)
    """Save rollouts for r3 view every so many steps, in <trainer.default_local_dir>/r3_run; 0: never."""
    rollouts_groups: int = Field(8, ge=0)
    """Groups per step whose answers are kept whole; of all others a summary is."""
    seed: int = 0
    """Draws the failures that reflection prompts show, and replayed samples where replay.order is random."""


def settings_of(config: DictConfig) -> VerlSettings:
    """The validated section, with the loss's denominators as verl's own settings say."""
    given = OmegaConf.to_container(config.get(KEY) or OmegaConf.create(), resolve=True)
    if not isinstance(given, dict):
        raise ConfigError(f"{KEY} holds settings by name, e.g. ++{KEY}.name=r3, and is {given!r}")
    objective = given.get("objective", {})
    if not isinstance(objective, dict) or set(objective) - OBJECTIVE_OF_R3:
        raise ConfigError(
            f"{KEY}.objective: the surrogate is verl's to set, with actor_rollout_ref.actor.clip_ratio_low, "
            "clip_ratio_high, loss_agg_mode, use_kl_loss and policy_loss.loss_mode; r3's are "
            + ", ".join(sorted(OBJECTIVE_OF_R3))
        )
    actor = config.actor_rollout_ref.actor
    by_sequence = actor.policy_loss.loss_mode == "gspo"  # verl's gspo averages by sequence, whatever loss_agg_mode says
    normalise = "sequence" if by_sequence else NORMALISE.get(actor.loss_agg_mode)
    if normalise is None:
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode} has no denominator that the method knows: "
            f"use one of {', '.join(NORMALISE)}"
        )
    constant = actor.loss_scale_factor if actor.loss_agg_mode == "seq-mean-token-sum-norm" else 1
    if normalise == "constant" and constant is None:
        raise ConfigError(
            "seq-mean-token-sum-norm without a constant divides by what a micro-batch is padded to: "
            "set actor_rollout_ref.actor.loss_scale_factor, e.g. to data.max_response_length"
        )
    weighed: dict[str, Any] = {"normalise": normalise, "ratio": "sequence" if by_sequence else "token"}
    if normalise == "constant":
        weighed["constant_length"] = constant
    settings = of_one_size(validate_as(VerlSettings, {**given, "objective": {**objective, **weighed}}, KEY), given)
    if settings.ranking.limit is not None:
        return settings
    ranking = settings.ranking.model_copy(update={"limit": config.data.max_response_length})
    return settings.model_copy(update={"ranking": ranking})


def described(config: DictConfig, settings: VerlSettings, *, total_steps: int) -> Described:
    """The run as its record has it: the method's settings as they are resolved, and all of verl's."""
    whole: Any = OmegaConf.to_container(config, resolve=False)
    plugin = whole.pop(KEY, {})
    tree, rollout = settings.model_dump(mode="json"), config.actor_rollout_ref.rollout
    limit = int(config.data.max_response_length)
    sections = {
        "model": {"path": str(config.actor_rollout_ref.model.path)},
        "method": {name: tree[name] for name in MethodSettings.model_fields},
        "rollout": {"group_size": int(rollout.n), "max_tokens": limit, "temperature": float(rollout.temperature)},
        KEY: plugin,
        "verl": whole,
    }
    return Described(
        method=settings,
        settings=sections,
        defaults={},
        versions={"verl": metadata.version("verl")},
        limit=limit,
        total_steps=total_steps,
        seed=settings.seed,
        rollouts_every=settings.rollouts_every,
        rollouts_groups=settings.rollouts_groups,
    )


Conflicts = Sequence[tuple[bool, str]]
"""Whether two settings cannot go together, and the fix."""


def checked(config: DictConfig, conflicts_of_trainer: Conflicts) -> VerlSettings:
    """The settings, or a ConfigError for the first of verl's settings that they cannot go with."""
    settings = settings_of(config)
    for conflict, fix in [*_of_presets(settings), *_conflicts(config, settings), *conflicts_of_trainer]:
        if conflict:
            raise ConfigError(fix)
    return settings


def conflicts_of_v1(config: DictConfig) -> Conflicts:
    """Settings of verl's V1 trainer alone."""
    return [
        (
            bool(config.trainer.v1.sampler.get("sync_refill_failed_groups")),
            "failed groups are left out of the batch: set trainer.v1.sampler.sync_refill_failed_groups=false",
        ),
        (bool(config.skip.rollout_tq.enable), "cached rollouts have no history: set skip.rollout_tq.enable=false"),
    ]


def conflicts_of_v0(config: DictConfig) -> Conflicts:
    """Settings of verl's V0 trainer alone."""
    whole = config.data.train_batch_size
    return [
        (
            not config.trainer.balance_batch,
            "past answers join where verl balances the batch over its workers: set trainer.balance_batch=true",
        ),
        (
            (config.data.get("gen_batch_size") or whole) != whole,
            f"a step's queries are asked together: leave data.gen_batch_size unset, or at {whole}",
        ),
        (
            bool(config.actor_rollout_ref.actor.get("use_prefix_grouper")),
            "use_prefix_grouper wants groups of one size, and replay makes them larger: set "
            "actor_rollout_ref.actor.use_prefix_grouper=false",
        ),
        (bool(config.skip.rollout.enable), "cached rollouts have no history: set skip.rollout.enable=false"),
    ]


def _of_presets(settings: VerlSettings) -> Conflicts:
    """Methods, and what they are made of, that are not offered in verl."""
    return [
        (
            settings.name in SURROGATES,
            f"{KEY}.name={settings.name} is a surrogate of r3 train, and here the surrogate is verl's to set: use "
            f"{KEY}.name=grpo with actor_rollout_ref.actor.policy_loss.loss_mode, clip_ratio_low, clip_ratio_high and "
            "loss_agg_mode",
        ),
        (
            settings.advantage.homogeneous != "none" or settings.advantage.baseline == "sign",
            f"{KEY}.advantage.homogeneous and baseline=sign (rl-zvp, lens, w-reinforce) are of r3 train alone: leave "
            "them out here",
        ),
        (
            settings.resample.enabled and settings.resample.fill == "copy",
            f"{KEY}.resample.fill=copy (polaris) trains on copies as weights, which is of r3 train alone: leave it out",
        ),
        (
            settings.distill.enabled,
            f"{KEY}.distill (sdpo) scores answers under a teacher's prompt, which is of r3 train alone: leave it out",
        ),
        (
            settings.demonstration.enabled,
            f"{KEY}.demonstration (luffy) trains on rows of the data with a surrogate of its own, which is of r3 train "
            "alone: leave it out",
        ),
        (
            settings.hint.enabled or settings.critique.enabled,
            f"{KEY}.hint (sage) and critique ask again within a step, and verl's step generates once: leave them out, "
            "or use r3 train",
        ),
        (
            settings.revisit.enabled,
            f"{KEY}.revisit (prompt-replay, exgrpo) chooses the queries of a step, and here verl's sampler does: leave "
            "it out",
        ),
        (
            settings.replay.enabled
            and (settings.replay.when in ("always", "revisited") or settings.replay.mode == "replace"),
            f"{KEY}.replay.when=always and replay.mode=replace (repo, rlep, exgrpo) are of r3 train alone: leave them "
            "out here",
        ),
        (
            settings.replay.enabled and settings.replay.ratio == "first_replayed",
            f"{KEY}.replay.ratio=first_replayed keeps log-probs of the update, which is verl's: leave it out, and "
            f"bound repetition with ++{KEY}.replay.max_repeats",
        ),
        (
            settings.reflection.enabled and settings.reflection.budget == "shared",
            f"{KEY}.reflection.budget=shared splits a query's group, and verl's groups have one size: leave it out, "
            f"and bound reflection with ++{KEY}.reflection.max_share",
        ),
        (
            settings.buffer.successes_from is not None,
            f"{KEY}.buffer.successes_from is of r3 train alone: leave it out here",
        ),
        (
            settings.resample.enabled,
            f"verl's sampler would draw again for the groups that R³ learns from: set ++{KEY}.resample=off, or for "
            "DAPO run verl's own trainer_mode=sync with algorithm.filter_groups",
        ),
    ]


def _conflicts(config: DictConfig, settings: VerlSettings) -> Conflicts:
    """Settings of verl's that cannot go together with R³, in either of its trainers."""
    actor_rollout, algorithm = config.actor_rollout_ref, config.algorithm
    loss, limit = actor_rollout.actor.policy_loss.loss_mode, config.data.max_prompt_length
    correction: Any = algorithm.get("rollout_correction") or {}
    reflecting = settings.reflection.enabled and settings.reflection.max_prompt_tokens > limit
    return [
        (
            bool((algorithm.get("filter_groups") or {}).get("enable")),
            "algorithm.filter_groups drops the groups that R³ learns from: set algorithm.filter_groups.enable=false",
        ),
        (
            algorithm.adv_estimator != ESTIMATOR,
            f"the advantages are Eq. 3's over mixed groups: set algorithm.adv_estimator={ESTIMATOR}",
        ),
        (
            config.reward.reward_manager.name != REWARD,
            f"R³ needs to know right, wrong and truncated: set reward.reward_manager.name={REWARD}, and your "
            "own judge, if you have one, as reward.custom_reward_function",
        ),
        (
            bool(config.reward.reward_model.enable),
            "R³ needs a verdict, not a score: set reward.reward_model.enable=false",
        ),
        (bool(config.critic.enable), "R³ has no critic: leave critic.enable unset"),
        (config.trainer.critic_warmup > 0, "R³ has no critic to warm up: set trainer.critic_warmup=0"),
        (
            bool(algorithm.use_kl_in_reward),
            "Eq. 3 is over rewards alone: use actor_rollout_ref.actor.use_kl_loss instead",
        ),
        (
            bool(correction.get("bypass_mode")),
            "bypass_mode skips the pass that entropies and the replayed rows' log-probs come from: "
            "set algorithm.rollout_correction.bypass_mode=false",
        ),
        (
            correction.get("rollout_rs") is not None,
            "rejection takes tokens out of the loss's denominators behind the method's back: set "
            f"algorithm.rollout_correction.rollout_rs=null; stale tokens are gated by ++{KEY}.objective.ratio_gate",
        ),
        (
            loss not in LOSSES,
            f"policy_loss.loss_mode={loss} is not linear in the advantage, which carries the replayed tokens' weights: "
            f"use one of {', '.join(LOSSES)}",
        ),
        (
            reflecting,
            f"verl would cut reflection prompts of up to {settings.reflection.max_prompt_tokens} tokens to "
            f"data.max_prompt_length={limit}, from the left: raise that, or set "
            f"++{KEY}.reflection.max_prompt_tokens={limit}",
        ),
        (bool(actor_rollout.rollout.multi_turn.enable), "R³ trains on one turn: set rollout.multi_turn.enable=false"),
    ]
