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
    UNBOUNDED,
    MethodName,
    ObjectiveName,
    Preset,
)
from r3.method.presets.baselines import BASELINES
from r3.method.presets.helped import HELPED
from r3.method.presets.r3 import BY_EVIDENCE, LETTER, R3
from r3.method.presets.remedies import REMEDIES

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

METHODS: Mapping[MethodName, Preset] = {**BASELINES, **REMEDIES, **HELPED, **R3}


def governed(*names: Any) -> tuple[str, ...]:
    """What naming one of these methods after the other sets, below `method`; names of no method count for nothing."""
    own = [key for name, preset in METHODS.items() if name in names for key in _keys(preset.settings)]
    return tuple(dict.fromkeys([*GOVERNED, *own]))


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
