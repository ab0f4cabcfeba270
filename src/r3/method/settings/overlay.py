"""Settings given by hand over those of a preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.method.presets import OBJECTIVES


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
