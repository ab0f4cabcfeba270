"""What every section of the settings tree shares; the sections themselves live in their rooms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


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
