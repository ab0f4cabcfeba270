"""What is shown to a policy, or joins its answers, that it could not find: demonstrations, hints, critiques."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from r3.settings import Switchable

CritiqueSource = Literal["verdict", "gold", "column"]


class DemonstrationSettings(Switchable):
    """A right answer from the data joins the group of its query, as if drawn with probability 1 (LUFFY)."""

    enabled: bool = False
    """Whether demonstrations join; each query has its own (task.demonstration_column, or what a made task writes)."""
    when: Literal["always", "solve_none"] = "always"
    """Which groups: all of them (the paper), or those alone that solved none."""
    trusted: bool = False
    """Take demonstrations for right. false: the task's judge decides, and one that it finds wrong does not join."""
    max_tokens: int | None = Field(None, ge=1)
    """A demonstration of more tokens does not join; None: rollout.max_tokens."""


class HintSettings(Switchable):
    """A query whose group solved none is asked again with a hint, a plainer one if need be (SAGE)."""

    enabled: bool = False
    """Whether failed queries are asked again, which costs a whole group for each hint that is tried."""
    levels: int | None = Field(None, ge=1)
    """Most hints of a query that are tried in one step, from the vaguest on; None: all that it has."""
    from_step: int = Field(1, ge=1)
    """The first step with hints (Scaf-GRPO: 50, once plain training has had its turn)."""
    template: str = "{question}\n\nA hint:\n\n{hint}\n\n{instruction}"
    """The prompt: {question}, {hint} and, where it stands, {instruction} are filled in."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of a hinted prompt; one that is longer is not asked, and the hints behind it neither."""

    @model_validator(mode="after")
    def _template_has_places(self) -> HintSettings:
        for place in ("{question}", "{hint}"):
            if self.template.count(place) != 1:
                raise ValueError(f"hint.template must contain {place} exactly once")
        return self


_ATTEMPT = "{question}\n\nAn attempt at this problem:\n\n{attempt}\n\n"
_AGAIN = "Find the mistake, then solve the problem again from the start.\n\n{instruction}"
CRITIQUES: dict[CritiqueSource, str] = {
    "verdict": _ATTEMPT + "The attempt is wrong. What a check said of it: {feedback}. " + _AGAIN,
    "gold": _ATTEMPT + "The attempt is wrong. The right answer is {feedback}. " + _AGAIN,
    "column": _ATTEMPT + "What a critic says of it:\n\n{feedback}\n\n" + _AGAIN,
}


class CritiqueSettings(Switchable):
    """A failure is shown with what was said of it, and a right refinement joins the plain group (Critique-GRPO)."""

    enabled: bool = False
    """Whether failures are refined in the step that they were made in, which costs an answer each."""
    feedback: CritiqueSource = "gold"
    """What is said of a failure: the verifier's word, the right answer, or the data's own (task.feedback_column)."""
    when: Literal["solve_none", "failures"] = "solve_none"
    """Refine the answers of groups that solved none (the paper's text), or wrong ones of every group (its code)."""
    attempts: int | None = Field(None, ge=1)
    """Most failures of a group that are refined, the first ones; None: all of them."""
    joins: int = Field(1, ge=1)
    """Most right refinements that join a group, the first ones."""
    template: str | None = None
    """The prompt: {question}, {attempt}, {feedback} and, where it stands, {instruction} are filled in; null: one that
    fits the source of the feedback."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Budget of the prompt; the failure is shortened in its middle to fit, the question never."""
    cut_marker: str = "\n[…]\n"
    """Stands where the middle of a long failure was cut."""

    @property
    def wording(self) -> str:
        """The template, given or of its own."""
        return CRITIQUES[self.feedback] if self.template is None else self.template

    @model_validator(mode="after")
    def _template_has_places(self) -> CritiqueSettings:
        for place in ("{question}", "{attempt}"):
            if self.wording.count(place) != 1:
                raise ValueError(f"critique.template must contain {place} exactly once")
        if self.feedback != "verdict" and "{feedback}" not in self.wording:  # that it is wrong the template may say
            raise ValueError(
                f"critique.feedback={self.feedback} is not shown: critique.template must contain {{feedback}}"
            )
        return self
