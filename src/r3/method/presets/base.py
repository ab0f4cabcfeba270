"""What a preset is: the names, the objectives, and what naming one sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MethodName = Literal[
    "grpo",
    "dapo",
    "polaris",
    "prompt-replay",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce++",
    "justrl",
    "maxrl",
    "rl-zvp",
    "lens",
    "w-reinforce",
    "repo",
    "rlep",
    "exgrpo",
    "sdpo",
    "luffy",
    "sage",
    "critique",
    "r3",
    "r3-paper",
    "r3-no-replay",
    "r3-no-reflection",
    "r3-no-ranking",
]
ObjectiveName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce"]

UNBOUNDED = 1e6
"""A clip so wide that no ratio reaches it."""

OBJECTIVES: Mapping[ObjectiveName, Mapping[str, Any]] = {
    "grpo": {},
    "dapo": {"normalise": "token", "clip_high": 0.28, "dual_clip": 10.0},
    "dr_grpo": {"normalise": "constant"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "cispo": {"surrogate": "cispo", "normalise": "token", "clip_low": 1.0, "clip_high": 4.0},
    "reinforce": {"normalise": "constant", "clip_low": 1.0, "clip_high": UNBOUNDED, "dual_clip": None},
}

GOVERNED_BY_OBJECTIVE = ("ratio", "surrogate", "normalise", "clip_low", "clip_high", "dual_clip")
"""What naming an objective sets, below `objective`."""

GOVERNED = (
    "replay.enabled",
    "reflection.enabled",
    "ranking.enabled",
    "resample.enabled",
    "revisit.enabled",
    "distill.enabled",
    "demonstration.enabled",
    "hint.enabled",
    "critique.enabled",
    "mask_truncated",
    "advantage.scale",
    "advantage.baseline",
    "advantage.homogeneous",
    "objective.name",
    *(f"objective.{name}" for name in GOVERNED_BY_OBJECTIVE),
)
"""What naming any method sets, below `method`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A method by name."""

    summary: str
    """What it does, in a line."""
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its values, over the defaults of the settings tree."""
    needs: str = "nothing"
    """Data or compute beyond one group of answers for each query."""
    departures: str = ""
    """Where ours differs from the source, beyond what all presets share."""
    length_bonus: bool = False
    """Whether it was published with a bonus for short right answers (`reward.length_bonus: auto`)."""
    overlong: bool = False
    """Whether it punishes answers near the length limit (`reward.overlong.enabled: auto`)."""


OFF: Mapping[str, Any] = {"enabled": False}
"""A section that is turned off."""
PLAIN: Mapping[str, Any] = {"replay": OFF, "reflection": OFF, "ranking": OFF}
"""The three mechanisms of R³ off."""
