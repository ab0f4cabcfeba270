"""Every number the method leaves open, as one validated tree; each method of `r3.method.presets` is a value of it.

The paper does not state k, α, λ, τ, p or R_max in what we could read. The defaults below are ours; each says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from r3.method.mechanisms import (
    CritiqueSettings,
    DemonstrationSettings,
    DistillSettings,
    HintSettings,
    RankingSettings,
    ReflectionSettings,
    ReplaySettings,
)
from r3.method.presets import METHODS, OBJECTIVES, MethodName, ObjectiveName
from r3.method.revisit import RevisitSettings
from r3.settings import Settings, Switchable

__all__ = [
    "OBJECTIVES",
    "AdvantageSettings",
    "CritiqueSettings",
    "DemonstrationSettings",
    "HintSettings",
    "MethodSettings",
    "ObjectiveSettings",
    "OverlongSettings",
    "RankingSettings",
    "ReflectionSettings",
    "ReplaySettings",
    "ResampleSettings",
    "RewardSettings",
    "ShapingSettings",
]


def from_preset(given: Any, presets: Mapping[Any, Mapping[str, Any]], default: str) -> Any:
    """`given` (a preset's name, or a mapping that may name one) laid over that preset."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict):
        return given
    # An unknown name falls through with its value: the field's own validation then lists the valid ones.
    name = given.get("name", default)
    return _overlay(presets.get(name, {}) if isinstance(name, str) else {}, given)


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, section by section, so that setting replay.k keeps a preset's replay.enabled."""
    merged = {**below, **above}
    for key, under in below.items():
        over = as_section(above.get(key, {}))
        if not (isinstance(under, Mapping) and isinstance(over, dict)):
            continue
        # An objective that is named is that objective, whatever the method's would be.
        merged[key] = over if key == "objective" and "name" in over else {**under, **over}
    return merged


def as_section(value: Any) -> Any:
    """The mapping that a section's short form stands for: a switch's on/off, or an objective's name."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, str) and value.lower() in ("on", "off"):
        return {"enabled": value.lower() == "on"}
    if isinstance(value, str) and value in OBJECTIVES:
        return {"name": value}
    return value


class AdvantageSettings(Settings):
    """Eq. 1 and Eq. 3, and the variants other trainers offer."""

    alpha: float = Field(1.0, gt=0)
    """α of Eq. 3, in groups that hold replayed samples; above 1 it tempers them. 1 is plain standardisation."""
    eps: float = Field(1e-6, ge=0)
    """λ of Eq. 3, added to the scaled standard deviation."""
    scale: Literal["std", "none", "mean", "batch_std"] = "std"
    """Divide by the group's standard deviation (GRPO), by nothing (Dr. GRPO), by the group's mean reward (MaxRL; no
    reward may be negative), or by the standard deviation of the batch's centred rewards (REINFORCE++)."""
    baseline: Literal["mean", "leave_one_out", "sign"] = "mean"
    """Subtract the group's mean (GRPO) or the mean of the other samples (RLOO); or compare nothing: a right answer gets
    `right_weight`, a wrong one −1 (W-REINFORCE; needs scale=none)."""
    homogeneous: Literal["none", "zvp", "lens", "signed"] = "none"
    """What a group gets that is all right or all wrong, and that neither replay nor ranking made comparable. none:
    nothing; zvp: each token an advantage by its entropy (RL-ZVP); lens: wrong answers cost more the surer the policy
    was, in mixed groups too (LENS); signed: as baseline=sign, in these groups alone."""
    zvp_alpha: float = Field(0.1, gt=0)
    """α of RL-ZVP: what a nat of entropy adds to a right token's advantage. Its paper: 0.1 or 0.2; 0.3 is unstable."""
    lens_weight: float = Field(0.25, gt=0)
    """What an all-wrong group weighs with LENS, beside a mixed one."""
    right_weight: float = Field(0.1, ge=0)
    """λ of W-REINFORCE: what a right answer gets, where a wrong one gets −1; 0 learns from wrong answers alone."""
    solve_all: Literal["scaled", "unscaled"] = "scaled"
    """Groups that solved all: divided like the others, so that whatever tells right answers apart (their length) pulls
    as hard as right and wrong do, and a past failure that joins gets −√(fresh/past); or left at the rewards' own size
    (then α does not act in them)."""
    cap: float | None = Field(None, gt=0)
    """Largest absolute advantage. A lone success among n gets √(n−1): a cap keeps one stale sequence from ruling."""


class ResampleSettings(Switchable):
    """Groups without variance leave the batch, and others take their place (DAPO's dynamic sampling, POLARIS)."""

    enabled: bool = False
    """Whether groups without variance are replaced."""
    max_rounds: int = Field(4, ge=1)
    """Most extra rounds of sampling to fill a batch; after that the batch is trained as full as it got."""
    fill: Literal["draw", "copy"] = "draw"
    """What takes their place: groups of further queries (DAPO), or copies of the batch's other groups, which cost no
    tokens (POLARIS)."""
    min_share: float = Field(0.0, ge=0, lt=1)
    """With fill=copy: train only if more than this share of the batch's groups has variance (POLARIS: a third)."""

    @model_validator(mode="after")
    def _share_of_a_batch_that_is_copied(self) -> ResampleSettings:
        if self.fill == "draw" and self.min_share > 0:
            raise ValueError(
                f"resample.min_share={self.min_share:g} is of a batch that is filled with copies, and with "
                "resample.fill=draw others are drawn for it: set resample.fill=copy or leave it out"
            )
        return self


class OverlongSettings(Settings):
    """DAPO's soft punishment of answers that come near the length limit."""

    enabled: Literal["auto"] | bool = "auto"
    """Whether answers near the limit lose reward; auto: as the method was published (DAPO yes, others no)."""
    buffer: float = Field(0.2, gt=0, le=1)
    """Share of rollout.max_tokens, at its end, over which the punishment grows linearly (DAPO: 4,096 of 20,480)."""
    factor: float = Field(0.5, gt=0)
    """What an answer at the limit loses. DAPO's 1 is for rewards of −1 and 1; ours are 0 and 1, hence half."""

    @model_validator(mode="before")
    @classmethod
    def _accept_on_off(cls, given: Any) -> Any:
        return as_section(given)


class RewardSettings(Settings):
    """Right: 1 + length bonus; wrong: 0; less what being near the length limit costs."""

    length_bonus: Literal["auto"] | bool = "auto"
    """Add max(0, 1 − l / length_limit) to a right answer of l tokens; auto: as the method was published (R³ yes, others
    no)."""
    length_limit: int = Field(32768, ge=1)
    """L_max of the length bonus."""
    overlong: OverlongSettings = Field(default_factory=OverlongSettings)

    def of(self, method: MethodName) -> RewardSettings:
        """What this comes to with a method: `auto` settled as it was published."""
        preset = METHODS[method]
        bonus = preset.length_bonus if self.length_bonus == "auto" else self.length_bonus
        punished = preset.overlong if self.overlong.enabled == "auto" else self.overlong.enabled
        overlong = self.overlong.model_copy(update={"enabled": punished})
        return self.model_copy(update={"length_bonus": bonus, "overlong": overlong})


class ShapingSettings(Settings):
    """What joins a group learns by A · x/(x + β) instead of the clipped ratio: rare tokens pull, learnt ones stop."""

    by: Literal["none", "policy", "ratio"] = "none"
    """What x is: the policy's probability of the token (LUFFY; also bounds what came from another prompt), or its ratio
    to the policy that drew it (ExGRPO)."""
    beta: float = Field(0.1, gt=0)
    """β: the x at which half of the pull is gone."""


class ObjectiveSettings(Settings):
    """The surrogate that is maximised. `objective: gspo` (or grpo, dapo, dr_grpo, cispo) picks a preset."""

    name: ObjectiveName = "grpo"
    """The preset that the other fields start from."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per sequence (the geometric mean of its tokens', GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """PPO's pessimistic minimum, or CISPO's clipped, gradient-free weight on the log-prob."""
    normalise: Literal["sequence", "token", "constant"] = "sequence"
    """Mean over sequences of the mean over tokens (GRPO), over all tokens (DAPO), or by a constant (Dr. GRPO)."""
    mean_over: Literal["queries", "groups"] = "queries"
    """What the loss is a mean over: the queries of a batch, so that a reflection group adds to the gradient, or all its
    groups, so that it takes from the others'."""
    constant_length: int | None = Field(None, ge=1)
    """The constant that a sequence's sum is divided by when normalise = constant; None: rollout.max_tokens."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 − this."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this (DAPO: 0.28)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """With a negative advantage the ratio counts at most this (dual-clip PPO); None leaves it unbounded there."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy (k3 estimator); 0 for none."""
    correction: Literal["truncated", "stopped", "naive", "recomputed"] = "truncated"
    """Stale tokens: truncated importance weights (decoupled from the clip); the same capped at 1 and ending where the
    policy has moved past the clip; the naive ratio inside the clip; or none, as if the policy had just drawn them, with
    log-probs computed again (RLEP)."""
    importance_cap: float = Field(2.0, gt=0)
    """Truncation of the importance weights."""
    ratio_gate: float | None = Field(10.0, gt=1)
    """Replayed tokens whose importance ratio is outside [1/gate, gate] teach nothing; None for no gate."""
    shaping: ShapingSettings = Field(default_factory=ShapingSettings)
    """Another objective for replayed tokens, demonstrations and refinements."""

    @property
    def constant(self) -> int:
        """`constant_length`, which must be known by the time that losses are weighed (`Config.settled`)."""
        if self.constant_length is None:
            raise ValueError("normalise=constant needs objective.constant_length, e.g. the limit of generated tokens")
        return self.constant_length

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, given: Any) -> Any:
        return from_preset(given, OBJECTIVES, "grpo")


class MethodSettings(Settings):
    """The whole method. `method: grpo` (or dapo, r3, r3-no-replay, …) picks a preset; any field overrides it."""

    name: MethodName = "r3"
    """The preset that the other fields start from; `r3 methods` lists them."""
    advantage: AdvantageSettings = Field(default_factory=AdvantageSettings)
    replay: ReplaySettings = Field(default_factory=ReplaySettings)
    reflection: ReflectionSettings = Field(default_factory=ReflectionSettings)
    ranking: RankingSettings = Field(default_factory=RankingSettings)
    resample: ResampleSettings = Field(default_factory=ResampleSettings)
    revisit: RevisitSettings = Field(default_factory=RevisitSettings)
    distill: DistillSettings = Field(default_factory=DistillSettings)
    demonstration: DemonstrationSettings = Field(default_factory=DemonstrationSettings)
    hint: HintSettings = Field(default_factory=HintSettings)
    critique: CritiqueSettings = Field(default_factory=CritiqueSettings)
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    mask_truncated: bool = False
    """Leave truncated samples out of the loss and of its denominators (DAPO's overlong filtering)."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, given: Any) -> Any:
        return from_preset(given, {name: preset.settings for name, preset in METHODS.items()}, "r3")

    @model_validator(mode="after")
    def _no_contradictions(self) -> MethodSettings:
        if self.mask_truncated and self.ranking.enabled:
            raise ValueError(
                "mask_truncated leaves out just the samples that the ranking reward teaches with: "
                "set ranking=off or mask_truncated=false"
            )
        if self.advantage.scale == "mean" and self.ranking.enabled and self.ranking.standardised:
            raise ValueError(
                "advantage.scale=mean divides ranking rewards by their own small mean, which makes them larger than a "
                "right answer's: set ranking=off or ranking.standardised=false"
            )
        return self

    @model_validator(mode="after")
    def _some_queries_are_revisited(self) -> MethodSettings:
        if self.replay.enabled and self.replay.when == "revisited" and not self.revisit.enabled:
            raise ValueError(
                "replay.when=revisited replays for queries that revisit asks before their turn, and it is off: set "
                "revisit=on or another replay.when"
            )
        return self

    @model_validator(mode="after")
    def _a_teacher_has_the_say(self) -> MethodSettings:
        if not self.distill.enabled:
            return self
        if self.resample.enabled:
            raise ValueError("resample takes the groups out that distill learns from too: set resample=off")
        for name in ("replay", "ranking", "demonstration", "hint", "critique"):
            if self.distill.weight == 1 and getattr(self, name).enabled:
                raise ValueError(
                    f"distill.weight=1 leaves nothing of the advantages that {name} makes: set {name}=off or a smaller "
                    "distill.weight"
                )
        return self

    @model_validator(mode="after")
    def _one_kind_of_help(self) -> MethodSettings:
        if self.hint.enabled:
            for name in ("demonstration", "critique"):
                if getattr(self, name).enabled:
                    raise ValueError(
                        f"hint puts another group in the place of one that solved none, and with it what {name} lets "
                        f"join: set {name}=off or hint=off"
                    )
            if self.resample.enabled:
                raise ValueError("resample takes other queries for the groups that hint asks again: set resample=off")
        for name in ("demonstration", "critique"):
            if getattr(self, name).enabled and self.replay.enabled and self.replay.baseline == "split":
                raise ValueError(
                    f"replay.baseline=split compares past answers with each other, and has no side for what {name} "
                    "lets join: set replay.baseline=joint"
                )
        return self

    @model_validator(mode="after")
    def _homogeneous_groups_are_there_to_teach(self) -> MethodSettings:
        options = self.advantage
        teaching = "advantage.baseline=sign" if options.baseline == "sign" else None
        if options.homogeneous != "none":
            if teaching:
                raise ValueError(
                    f"advantage.homogeneous={options.homogeneous} is for groups that {teaching} learns from already: "
                    "set one of them to its default (none, mean)"
                )
            teaching = f"advantage.homogeneous={options.homogeneous}"
        if options.baseline == "sign" and options.scale != "none":
            raise ValueError(f"{teaching} compares nothing, so there is nothing to divide by: set advantage.scale=none")
        if options.baseline == "sign" and self.ranking.enabled:
            raise ValueError(f"{teaching} knows right and wrong alone, no rewards to rank by: set ranking=off")
        if options.homogeneous == "lens" and options.scale == "mean":
            raise ValueError(
                "advantage.homogeneous=lens makes rewards of wrong answers negative, which advantage.scale=mean "
                "(maxrl) cannot divide by: use another scale, or homogeneous=zvp or signed"
            )
        if teaching and self.resample.enabled:
            raise ValueError(f"resample takes the groups out that {teaching} learns from: set resample=off")
        if teaching and self.mask_truncated:
            raise ValueError(
                f"{teaching} learns from wrong answers that nothing compares, and mask_truncated leaves out those that "
                "were cut, so that only the short ones would be pushed away: set mask_truncated=false"
            )
        return self
