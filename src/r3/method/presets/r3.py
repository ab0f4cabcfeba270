"""R³: the paper's letter, what experiments speak for, and the ablations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.method.presets.base import OFF, MethodName, Preset

SOURCE = "arXiv 2601.19620"

LETTER: Mapping[str, Mapping[str, Any]] = {
    "replay": {
        "when": "homogeneous",
        "mode": "join",
        "baseline": "joint",
        "failures": True,
        "max_repeats": None,
        "ratio": "drawn",
    },
    "reflection": {
        "train_as": "reflection",
        "window": None,
        "when": "hard",
        "at_once": False,
        "budget": "extra",
        "max_share": 1.0,
        "min_lift": 0.0,
    },
    "ranking": {"scope": "truncated", "centred": False, "standardised": True, "alone": True, "gate": False},
}
"""The paper's way, of every switch that R³ and its ablations govern."""

BY_EVIDENCE: Mapping[str, Mapping[str, Any]] = {
    "replay": {},
    "reflection": {"window": 16, "at_once": True, "budget": "shared", "min_lift": 2.0},
    "ranking": {"centred": True, "standardised": False, "alone": False},
}
"""What `r3` and its ablations have instead, since experiments speak for it (docs/results.md); keys of `LETTER`."""


def _r3(without: str | None = None) -> dict[str, dict[str, Any]]:
    """R³ as `r3` has it, whole or without one of its mechanisms."""
    sections = {name: {**switches, **BY_EVIDENCE[name]} for name, switches in LETTER.items()}
    return sections if without is None else {**sections, without: {**sections[without], **OFF}}


R3: Mapping[MethodName, Preset] = {
    "r3": Preset(
        "replay, reflection and ranking rewards for groups that teach nothing",
        SOURCE,
        _r3(),
        needs="a buffer on disk, further rollouts for reflection",
        departures=(
            "reflection shares a hard query's own answers, joins in the same step, goes by the newest 16 plain answers "
            "and pauses below a lift of 2; ranking rewards are centred, keep their own size and make no update alone. "
            "r3-paper has the paper's way of each"
        ),
        length_bonus=True,
    ),
    "r3-paper": Preset(
        "R³ with every switch at the paper's letter, whatever r3 or the recipe have instead",
        SOURCE,
        LETTER,
        needs="a buffer on disk, further rollouts for reflection",
        departures=(
            "numbers (k, τ, p, R_max, …), templates and what bounds stale samples (method.objective) are the recipe's"
        ),
        length_bonus=True,
    ),
    "r3-no-replay": Preset(
        "R³ without replay", SOURCE, _r3("replay"), needs="further rollouts for reflection", length_bonus=True
    ),
    "r3-no-reflection": Preset(
        "R³ without reflection", SOURCE, _r3("reflection"), needs="a buffer on disk", length_bonus=True
    ),
    "r3-no-ranking": Preset(
        "R³ without ranking rewards",
        SOURCE,
        _r3("ranking"),
        needs="a buffer on disk, further rollouts for reflection",
        length_bonus=True,
    ),
}
