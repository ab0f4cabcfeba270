"""What an answer is worth."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from r3.method.presets import METHODS, MethodName
from r3.method.settings.overlay import as_section
from r3.settings import Settings


class OverlongSettings(Settings):
    """DAPO's soft punishment of answers that come near the length limit."""

    enabled: Literal["auto"] | bool = "auto"
    """Whether answers near the limit lose reward; auto: as the method was published (DAPO yes, others no)."""
    buffer: float = Field(0.2, gt=0, le=1)
    """Share of rollout.max_tokens, at its end, over which the punishment grows in a line (DAPO: 4,096 of 20,480)."""
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
