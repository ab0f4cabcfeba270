"""Every number the method leaves open, as one validated tree; each method of `r3.method.presets` is a value of it.

The paper does not state k, α, λ, τ, p or R_max in what we could read. The defaults below are ours; each says why.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from r3.method.distill_settings import DistillSettings
from r3.method.presets import METHODS, OBJECTIVES, MethodName
from r3.method.revisit import RevisitSettings
from r3.method.settings.groups import AdvantageSettings, ResampleSettings
from r3.method.settings.help import CritiqueSettings, DemonstrationSettings, HintSettings
from r3.method.settings.mechanisms import RankingSettings, ReflectionSettings, ReplaySettings
from r3.method.settings.objective import ObjectiveSettings, ShapingSettings
from r3.method.settings.overlay import from_preset
from r3.method.settings.reward import OverlongSettings, RewardSettings
from r3.settings import Settings

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
    def _startfrom_preset(cls, given: Any) -> Any:
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
