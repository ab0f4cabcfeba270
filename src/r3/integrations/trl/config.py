"""`R3Config`: TRL's `GRPOConfig` and r3's method settings, checked against each other.

What TRL already has a setting for stays TRL's: the clip (`epsilon`, `epsilon_high`), the loss and its denominators
(`loss_type`), the KL (`beta`), the ratio's level (`importance_sampling_level`), the scale (`scale_rewards`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from r3.config import validate_as
from r3.errors import ConfigError
from r3.integrations.common import of_one_size
from r3.method.settings import MethodSettings

# How each of TRL's losses weighs a token, in the words of r3's objective. `luspo` sums over a row: a constant of 1.
NORMALISE = {
    "grpo": "sequence",
    "sapo": "sequence",
    "dr_grpo": "constant",
    "luspo": "constant",
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
}
# Methods of r3 that this trainer does not run, and what TRL has instead.
ELSEWHERE = {
    "dr_grpo": "it is TRL's own: r3_method='grpo' with loss_type='dr_grpo' and scale_rewards='none'",
    "gspo": "it is TRL's own: r3_method='grpo' with importance_sampling_level='sequence', epsilon=3e-4 and "
    "epsilon_high=4e-4",
    "cispo": "it is TRL's own: r3_method='grpo' with loss_type='cispo' and epsilon_high=5.0",
    "rloo": "it is TRL's own: trl.RLOOTrainer",
    "reinforce++": "the nearest is r3_method='grpo' with scale_rewards='batch'",
    "justrl": "it is TRL's own: r3_method='grpo' with loss_type='dapo' and epsilon_high=0.28",
    "maxrl": "TRL has nothing like it",
    "rl-zvp": "it gives every token an advantage of its own, and TRL's rows have one for all",
    "lens": "TRL has nothing like it",
    "w-reinforce": "TRL has nothing like it",
    "repo": "its surrogate on replayed rows would be TRL's to set",
    "rlep": "its surrogate on replayed rows would be TRL's to set",
    "exgrpo": "its surrogate on replayed rows would be TRL's to set",
    "polaris": "its copies weigh a group twice, and TRL's rows weigh the same",
    "prompt-replay": "it chooses the queries of a step, and here TRL's sampler does",
    "sdpo": "the nearest is trl.experimental.sdpo",
    "luffy": "its surrogate on the demonstration's row would be TRL's to set",
    "sage": "it asks again within a step, and TRL's step generates once",
    "critique": "it asks again within a step, and TRL's step generates once",
}
OBJECTIVE_OF_R3 = {"importance_cap", "ratio_gate", "mean_over"}


@dataclass
class R3Config(GRPOConfig):
    """`GRPOConfig` with the settings of R³. Those that start with `r3_` are ours, all others TRL's."""

    # As in TRL, so that the command line takes JSON for it.
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "r3_overrides"]  # noqa: RUF012

    r3_method: str = field(
        default="r3", metadata={"help": "Preset: r3, r3-paper, r3-no-replay, …; grpo is TRL's own trainer."}
    )
    r3_overrides: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Method settings over the preset, nested or dotted: {'replay.k': 4, 'ranking': 'off'}."},
    )
    r3_outcome_reward: str | None = field(
        default=None,
        metadata={"help": "Name of the reward function that tells right from wrong; the first by default."},
    )
    r3_right_above: float = field(
        default=0.5, metadata={"help": "An answer is right if that function's reward is above this."}
    )
    r3_id_column: str | None = field(
        default=None, metadata={"help": "Data column with the query's id; by default the id is a hash of the prompt."}
    )
    r3_max_reflections: int | None = field(
        default=None, metadata={"help": "Most reflection groups that join one generation batch; None for no limit."}
    )
    r3_buffer_path: str | None = field(
        default=None,
        metadata={"help": "File of the sample buffer, on a local disk; <output_dir>/r3_buffer.sqlite by default."},
    )
    r3_buffer_per_query: int | None = field(default=64, metadata={"help": "Most living samples of one query."})
    r3_buffer_total: int | None = field(default=1_000_000, metadata={"help": "Most living samples in all."})
    r3_rollouts_every: int = field(
        default=1,
        metadata={"help": "Save the rollouts of every n-th step for r3 view, in <output_dir>/r3_run; 0: never."},
    )
    r3_rollouts_groups: int = field(
        default=8, metadata={"help": "Groups per step whose answers are kept whole; the others keep a summary."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        method = self.method()
        _refuse_idle(self, method)
        if not changes_training(method):
            return
        for conflict, fix in _conflicts(self, method):
            if conflict:
                raise ValueError(fix)
        if self.use_vllm and self.vllm_mode == "colocate":
            self.check_context(self.vllm_max_model_length)
        accumulated = int(self.steps_per_generation or 0) * self.num_iterations
        if self.save_strategy == "steps" and (self.save_steps * self.gradient_accumulation_steps) % accumulated:
            warnings.warn(
                f"save_steps={self.save_steps} saves between two generations, where TRL cannot resume exactly: make "
                "save_steps × gradient_accumulation_steps a multiple of steps_per_generation × num_iterations",
                stacklevel=3,
            )

    def check_context(self, context: int | None) -> None:
        """Refuse a context of vLLM's that a reflection prompt and its answer may not fit into."""
        reflection, answer = self.method().reflection, int(self.max_completion_length or 0)
        if context is None or not reflection.enabled or reflection.max_prompt_tokens + answer <= context:
            return
        raise ValueError(
            f"a reflection prompt may have {reflection.max_prompt_tokens} tokens and its answer {answer}, and vLLM's "
            f"context is {context}: vLLM ends the run at a prompt that does not fit, and cuts the answer to one that "
            f"hardly does. Set r3_overrides={{'reflection.max_prompt_tokens': {context - answer}}}, or a "
            f"vllm_max_model_length of {reflection.max_prompt_tokens + answer} if the model goes that far"
        )

    def method(self) -> MethodSettings:
        """The method's settings: the preset, the overrides, and what TRL's own settings say."""
        if self.r3_method in ELSEWHERE:
            raise ValueError(
                f"r3_method={self.r3_method!r} is a method of r3 train, and R3Trainer would not run it: "
                f"{ELSEWHERE[self.r3_method]}"
            )
        overrides = _nested(self.r3_overrides if isinstance(self.r3_overrides, dict) else {})
        if strange := set(_section(overrides, "objective")) - OBJECTIVE_OF_R3:
            raise ValueError(
                f"r3_overrides: objective.{sorted(strange)[0]} is TRL's to set: use epsilon, epsilon_high, loss_type, "
                "beta or importance_sampling_level"
            )
        if "mask_truncated" in overrides:
            raise ValueError("r3_overrides: mask_truncated is TRL's to set: use mask_truncated_completions")
        if self.scale_rewards == "none":
            overrides["advantage"] = {"scale": "none", **_section(overrides, "advantage")}
        if self.loss_type in NORMALISE:
            constant = 1 if self.loss_type == "luspo" else self.max_completion_length
            normalised = {"normalise": NORMALISE[self.loss_type], "constant_length": constant}
            overrides["objective"] = {**_section(overrides, "objective"), **normalised}
        try:
            settings = validate_as(MethodSettings, {"name": self.r3_method, **overrides}, under="r3_overrides")
            settings = of_one_size(settings, overrides)
        except ConfigError as error:
            raise ConfigError(str(error).replace("r3_overrides.name:", "r3_method:")) from error
        if settings.ranking.limit is None:
            ranking = settings.ranking.model_copy(update={"limit": self.max_completion_length})
            settings = settings.model_copy(update={"ranking": ranking})
        if not self.mask_truncated_completions:
            return settings
        if settings.ranking.enabled:
            raise ValueError(
                "mask_truncated_completions leaves out just the answers that the ranking reward teaches with: "
                "set mask_truncated_completions=False or r3_method='r3-no-ranking'"
            )
        return settings.model_copy(update={"mask_truncated": True})


def changes_training(method: MethodSettings) -> bool:
    """Whether anything of the method is on that TRL's own trainer has not."""
    parts = (
        *(method.replay, method.reflection, method.ranking, method.resample, method.revisit, method.distill),
        *(method.demonstration, method.hint, method.critique),
    )
    return any(part.enabled for part in parts)


def _refuse_idle(args: R3Config, method: MethodSettings) -> None:
    """With every mechanism off this is TRL's trainer, and whatever else the overrides say would silently do nothing."""
    if changes_training(method):
        return
    given = _nested(args.r3_overrides if isinstance(args.r3_overrides, dict) else {})
    idle = sorted(set(given) - {"replay", "reflection", "ranking", "resample"})
    if idle:
        raise ValueError(
            f"r3_overrides: {idle[0]} has no effect, since with replay, reflection, ranking and resample off this is "
            "TRL's own trainer: use TRL's settings (scale_rewards, loss_type, …), or turn a mechanism on"
        )


def _conflicts(args: R3Config, method: MethodSettings) -> list[tuple[bool, str]]:
    """Settings that cannot go together, with the fix for each."""
    return [
        (
            method.advantage.homogeneous != "none" or method.advantage.baseline == "sign",
            "r3_overrides: advantage.homogeneous and advantage.baseline='sign' train on groups that this trainer does "
            "not lay out: leave them out, or use r3 train",
        ),
        (
            method.resample.enabled and method.resample.fill == "copy",
            "r3_overrides: resample.fill=copy (polaris) trains on copies as weights, which is of r3 train alone: leave "
            "it out",
        ),
        (
            method.distill.enabled,
            "r3_overrides: distill (sdpo) scores answers under a teacher's prompt, and TRL's step has no place for "
            "that: leave it out, or use r3 train or trl.experimental.sdpo",
        ),
        (
            method.demonstration.enabled,
            "r3_overrides: demonstration (luffy) trains on rows of the data with a surrogate of its own, which is of "
            "r3 train alone: leave it out",
        ),
        (
            method.hint.enabled or method.critique.enabled,
            "r3_overrides: hint (sage) and critique ask again within a step, and TRL's step generates once: leave them "
            "out, or use r3 train",
        ),
        (
            method.revisit.enabled,
            "r3_overrides: revisit (prompt-replay, exgrpo) chooses the queries of a step, and here TRL's sampler does: "
            "leave it out, or use r3 train",
        ),
        (
            method.replay.enabled
            and (method.replay.when in ("always", "revisited") or method.replay.mode == "replace"),
            "r3_overrides: replay.when='always' and replay.mode='replace' are of r3 train alone: leave them out",
        ),
        (
            method.replay.enabled and method.replay.ratio == "first_replayed",
            "r3_overrides: replay.ratio='first_replayed' keeps log-probs of the update, which is TRL's: leave it out, "
            "and bound repetition with replay.max_repeats",
        ),
        (
            method.reflection.enabled and method.reflection.budget == "shared",
            "r3_overrides: reflection.budget='shared' splits a query's group, and TRL's groups have one size: leave it "
            "out, and bound reflection with reflection.max_share or r3_max_reflections",
        ),
        (
            args.r3_method == "dapo" and (args.loss_type != "dapo" or args.epsilon_high is None),
            "r3_method='dapo' brings DAPO's resampling, and its clip and token mean are TRL's to set: set "
            "loss_type='dapo' and epsilon_high=0.28",
        ),
        (
            args.loss_type not in NORMALISE,
            f"loss_type={args.loss_type!r} divides by what a micro-batch happens to hold, which replayed rows change: "
            f"use one of {', '.join(NORMALISE)}",
        ),
        (
            args.scale_rewards not in ("group", "none"),
            f"scale_rewards={args.scale_rewards!r} is not Eq. 3, which compares within a group: use 'group' or 'none'",
        ),
        (
            args.multi_objective_aggregation != "sum_then_normalize",
            "Eq. 3 normalises one reward per answer: use multi_objective_aggregation='sum_then_normalize'",
        ),
        (
            args.r3_max_reflections is not None and args.r3_max_reflections < 1,
            "r3_max_reflections must be at least 1, or None for no limit; for no reflection use r3-no-reflection",
        ),
    ]


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{'replay.k': 4} as {'replay': {'k': 4}}; nested settings stay as they are."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if not dot:
            nested[key] = {**nested[key], **value} if isinstance(value, dict) and key in nested else value
        else:
            nested[section] = {**_section(nested, section), name: value}
    return nested


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"r3_overrides: {name} is given as {section!r} and field by field; give one of the two")
    return section
