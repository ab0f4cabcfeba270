"""Methods and objectives by name: what each sets, where its numbers come from, and where ours departs from it.

A preset is a handful of values of the settings tree (`r3.method.settings`), never a branch of the loop. Two things of
the reward belong to a method as well: whether it was published with a bonus for short right answers and whether it
punishes answers near the length limit; `reward.length_bonus` and `reward.overlong.enabled` follow them while they are
`auto`.

Naming a preset sets every key of `GOVERNED` to what the preset says, or to the default where it says nothing, and
beside them what the preset itself sets (`governed`); all other settings (how many samples R³ replays, when reflection
gives up, …) are left as they are. R³ and its ablations set every switch that has a paper's way and another (`LETTER`),
so that naming one of them says which; their numbers (k, τ, budgets, templates) are the recipe's.

Departures that all presets share: rewards of outcomes are 0 and 1 (papers with ±1: the same after normalising, and
penalties are halved to keep their proportion); the standard deviation is the population's, where most code divides by
n − 1 (a common factor √(n/(n−1))); learning rate, batch, group size and limits are the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.method.presets.base import (
    GOVERNED,
    GOVERNED_BY_OBJECTIVE,
    OBJECTIVES,
    OFF,
    UNBOUNDED,
    MethodName,
    ObjectiveName,
    Preset,
)
from r3.method.presets.published import BASELINES, HELPED, REMEDIES

__all__ = [
    "BY_EVIDENCE",
    "GOVERNED",
    "LETTER",
    "METHODS",
    "OBJECTIVES",
    "UNBOUNDED",
    "MethodName",
    "ObjectiveName",
    "Preset",
    "governed",
    "reset",
    "reset_objective",
]

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


METHODS: Mapping[MethodName, Preset] = {**BASELINES, **REMEDIES, **HELPED, **R3}


def governed(*names: Any) -> tuple[str, ...]:
    """What naming one of these methods after the other sets, below `method`; names of no method count for nothing."""
    keys = [key for name, preset in METHODS.items() if name in names for key in _keys(preset.settings)]
    return tuple(dict.fromkeys([*GOVERNED, *keys]))


def _keys(settings: Mapping[str, Any]) -> list[str]:
    """Sections' own keys, dotted; a mapping within a section (objective.shaping) is one value."""
    return [
        f"{section}.{key}" if isinstance(value, Mapping) else section
        for section, value in settings.items()
        for key in (value if isinstance(value, Mapping) else [section])
    ]


def reset(method: dict[str, Any], name: str) -> None:
    """Name a method in a plain mapping of method settings: what it and the one before govern goes, the rest stays."""
    for key in governed(method.get("name"), name):
        _drop(method, *key.split("."))
    method["name"] = name


def reset_objective(objective: dict[str, Any], name: str) -> None:
    """The same for an objective in its section."""
    for key in GOVERNED_BY_OBJECTIVE:
        objective.pop(key, None)
    objective["name"] = name


def _drop(method: dict[str, Any], key: str, below: str | None = None) -> None:
    section = method.get(key)
    if below is None or not isinstance(section, dict):  # a setting, or a section's short form (replay: off)
        method.pop(key, None)
    else:
        section.pop(below, None)
