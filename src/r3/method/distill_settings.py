"""The settings of self-distillation (`r3.method.distill` says what they do)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from r3.settings import Switchable

TEMPLATE = (
    "{question}\n\nA correct solution of this problem:\n\n{attempt}\n\nSolve the problem yourself.\n\n{instruction}"
)
FEEDBACK = (
    "{question}\n\nWhat a check said of an earlier attempt at this problem:\n\n{attempt}\n\nSolve the problem yourself."
    "\n\n{instruction}"
)


class DistillSettings(Switchable):
    """Self-distillation: the policy that sees a right answer teaches itself without, token by token (SDPO)."""

    enabled: bool = False
    """Whether the teacher is asked, which costs one more forward pass for each answer that is taught."""
    weight: float = Field(1.0, gt=0, le=1)
    """Share of the teacher in an answer's advantage; the rest is the method's own. 1: the teacher alone (SDPO)."""
    clip: float | None = Field(None, gt=0)
    """Largest absolute log T − log S of a token; None for no bound."""
    history: bool = True
    """Show a past success from the buffer where the group has no other one."""
    feedback: bool = True
    """Show what the verifier said (a failing test, say) where no success is known."""
    show: Literal["all", "answer"] = "all"
    """How much of a success is shown: all of it, or only what follows its thought (behind the last </think>)."""
    template: str = TEMPLATE
    """The teacher's prompt: {question}, {attempt} (the success) and, where it stands, {instruction} are filled in."""
    feedback_template: str = FEEDBACK
    """The same where the verifier's word is shown, in the place of {attempt}."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of the teacher's prompt; what is shown is shortened in its middle to fit, the question never."""

    @model_validator(mode="after")
    def _templates_have_places(self) -> DistillSettings:
        for name in ("template", "feedback_template"):
            for place in ("{question}", "{attempt}"):
                if getattr(self, name).count(place) != 1:
                    raise ValueError(f"distill.{name} must contain {place} exactly once")
        return self
