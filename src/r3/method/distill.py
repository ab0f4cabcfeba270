"""SDPO in sampled-token mode: the policy that was shown a right answer teaches the one that was not, token by token.

    T      = π(· | question ⊕ a success ⊕ the request to solve it)      the teacher: the same weights, another prompt
    A_t    = log T(y_t) − log S(y_t)                                    of each token y_t that the student S drew
    weight < 1: A_t = weight · (log T − log S) + (1 − weight) · the method's own advantage

With the surrogate of CISPO this is SDPO's loss for α = 1: −min(π/π_old, 2) · sg[log T − log S] · log π, whose mean over
the student's draws is the reverse KL divergence to the teacher (arXiv 2601.20802; TRL's `experimental.sdpo`).

What is shown: the first other success of the group; else a past success of the query from the buffer (`history`), which
SDPO lacks and which is what an all-wrong group can be taught by; else what the verifier said of the answer
(`feedback`). An answer with none of these leaves the loss and its denominators, unless the weight leaves it a rest.

Departures from the source:
- The teacher is the live policy at the start of the step; theirs is a moving average (0.05 per step).
- Only the sampled tokens are compared, α = 1; theirs are the student's top 100 with a rest, α = 0.5.
- log S is that of the policy that drew the answer: not the current one with several updates per batch or `ahead`.
- A truncated or wrong answer is taught like a right one, and so is one to a group that is all right, as in theirs.

`lessons_of` says which answer is taught by what, under which prompt; `distilled` turns the teacher's log-probs into
advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r3.method.mechanisms import DistillSettings
from r3.method.mixed import Member, MixedGroup
from r3.method.reflection import Tokenizer, reflection_prompt
from r3.method.settings import ReflectionSettings
from r3.samples import FloatArray, Group, IntArray, Sample

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
        choice = _shown(group, member, past, tokenizer, settings)
        if choice is None:
            continue
        tokens, shown = choice
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


Teacher = Mapping[tuple[int, int], FloatArray]
"""log T of each token, by group and member."""


def token_advantages(teacher: FloatArray, student: FloatArray, clip: float | None = None) -> FloatArray:
    """log T − log S of each token.

    >>> token_advantages(np.log([0.9, 0.1]), np.log([0.5, 0.5])).astype(float).round(4).tolist()
    [0.5878, -1.6094]
    """
    difference = (np.asarray(teacher, np.float64) - np.asarray(student, np.float64)).astype(np.float32)
    return difference if clip is None else difference.clip(-clip, clip)


def distilled(groups: Sequence[MixedGroup], teacher: Teacher, settings: DistillSettings) -> tuple[MixedGroup, ...]:
    """The groups with what the teacher says of their fresh answers in the place of their own advantages."""
    if not settings.enabled:
        return tuple(groups)
    return tuple(
        replace(mixed, members=tuple(_taught(m, teacher.get((g, i)), settings) for i, m in enumerate(mixed.members)))
        for g, mixed in enumerate(groups)
    )


def _taught(member: Member, teacher: FloatArray | None, settings: DistillSettings) -> Member:
    if teacher is None:
        return replace(member, left_out=True, advantage=0.0) if settings.weight == 1 else _scaled(member, settings)
    scaled = _scaled(member, settings)
    rest = scaled.advantage if scaled.token_advantages is None else scaled.token_advantages
    mixed = settings.weight * token_advantages(teacher, member.sample.logprobs, settings.clip) + rest
    return replace(member, advantage=float(mixed.mean()), token_advantages=mixed.astype(np.float32))


def _scaled(member: Member, settings: DistillSettings) -> Member:
    """What the weight leaves of the method's own advantage."""
    share = 1 - settings.weight
    tokens = None if member.token_advantages is None else (share * member.token_advantages).astype(np.float32)
    return replace(member, advantage=share * member.advantage, token_advantages=tokens)
