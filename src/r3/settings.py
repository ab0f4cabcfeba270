"""What every section of the settings tree shares; the sections themselves live in their rooms."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

MOST = 2**53
"""No whole number of a setting may be above this: what floats, torch and SQLite all hold exactly."""
_NUMBERS = {str(kind) for kind in (int, float, int | None, float | None)}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, the docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """What pydantic would take for something else, or nothing behind it could use, is refused."""
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and annotation in _NUMBERS:
            raise ValueError("must be a number, not true or false")
        if isinstance(value, str) and not _is_text(value):
            raise ValueError("holds a zero byte or half a character (a lone surrogate)")
        if isinstance(value, int | float) and MOST < abs(value) < math.inf:
            raise ValueError(f"beyond {MOST:,}")
        return value


class Switchable(Settings):
    """A mechanism that can be turned off: `replay: off` means `replay: {enabled: false}`."""

    enabled: bool = True
    """Whether the mechanism acts at all."""

    @model_validator(mode="before")
    @classmethod
    def _accept_on_off(cls, given: Any) -> Any:
        if isinstance(given, bool):
            return {"enabled": given}
        if isinstance(given, str) and given.lower() in ("on", "off"):
            return {"enabled": given.lower() == "on"}
        return given
