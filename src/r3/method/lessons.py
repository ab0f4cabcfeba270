"""The teacher's prompts of self-distillation (`r3.method.distill`): which answer is taught by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from r3.method.distill_settings import DistillSettings
from r3.method.reflection import Tokenizer, reflection_prompt
from r3.method.settings import ReflectionSettings
from r3.samples import Group, IntArray, Sample

Shown = Literal["success", "history", "feedback"]


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """An answer whose tokens the teacher is to score, and the prompt that it does it under."""

    group: int
    member: int
    prompt: IntArray
    shown: Shown
    """Another success of the group, a past one, or the verifier's word."""


def lessons_of(
    number: int, group: Group, past: Sequence[Sample], tokenizer: Tokenizer, settings: DistillSettings
) -> list[Lesson]:
    """The lessons of a plain group; answers for which nothing can be shown, or not within the budget, get none."""
    lessons = []
    for member in range(len(group)):
        found = _shown(group, member, past, tokenizer, settings)
        if found is None:
            continue
        tokens, shown = found
        template = settings.feedback_template if shown == "feedback" else settings.template
        whole = "all" if shown == "feedback" else settings.show
        options = {"template": template, "show": whole, "max_prompt_tokens": settings.max_prompt_tokens}
        prompt = reflection_prompt(group.query, tokens, tokenizer, ReflectionSettings.model_validate(options))
        if prompt is not None:
            lessons.append(Lesson(number, member, prompt, shown))
    return lessons


def _shown(
    group: Group, member: int, past: Sequence[Sample], tokenizer: Tokenizer, settings: DistillSettings
) -> tuple[list[int], Shown] | None:
    """What the teacher sees: never the answer that it is to score."""
    for other, sample in enumerate(group.samples):
        if sample.outcome and other != member:
            return sample.tokens.tolist(), "success"
    if settings.history and past:
        return past[0].tokens.tolist(), "history"
    said = group.samples[member].feedback.strip()
    if settings.feedback and said and not group.samples[member].outcome:
        return list(tokenizer.encode(said, add_special_tokens=False)), "feedback"
    return None
