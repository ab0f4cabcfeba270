"""From a trainer's answers to verified groups, and from the method's weights to those of the trainer's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from r3.algorithm import Prompt
from r3.method.settings import MethodSettings
from r3.samples import FloatArray, Group, IntArray, Sample

AnyMethod = TypeVar("AnyMethod", bound=MethodSettings)


@dataclass(frozen=True, slots=True)
class Answer:
    """One row as the trainer generated and judged it."""

    prompt: IntArray
    tokens: IntArray
    logprobs: FloatArray
    entropies: FloatArray | None
    truncated: bool
    right: bool
    rewards: Mapping[str, float]
    """The parts of its reward, by name."""


def to_groups(answered: Sequence[tuple[Prompt, Sequence[Answer]]], *, version: int, step: int) -> list[Group]:
    """The answers to each prompt as a verified group, in order, under the prompt tokens that were really used."""
    plain = {prompt.position: answers[0].prompt for prompt, answers in answered if prompt.context.kind == "plain"}
    groups = []
    for prompt, answers in answered:
        under = plain[prompt.position] if prompt.context.kind == "reflection" else None
        put = replace(prompt, tokens=answers[0].prompt, plain_tokens=under)
        groups.append(put.group([_sample(prompt, answer, version, step) for answer in answers]))
    return groups


def _sample(prompt: Prompt, answer: Answer, version: int, step: int) -> Sample:
    return Sample(
        prompt.query.id,
        answer.tokens,
        answer.logprobs,
        answer.entropies,
        finish="length" if answer.truncated else "stop",
        outcome=answer.right,
        reward=math.fsum(answer.rewards.values()),
        reward_parts=answer.rewards,
        context=prompt.context,
        policy_version=version,
        step=step,
        epoch=prompt.epoch,
    )


def scale_of(settings: MethodSettings, rows: int, tokens: int) -> Callable[[float, int], float]:
    """Turns a token's weight into a factor on the advantage, given what the trainer's loss divides a token of a row by.

    Trainers count rows (or tokens) where the method counts groups and their members: a mixed group of G + k members
    would weigh more than one of G. The factor is 1 wherever nothing joined and no row was added or dropped.
    """
    objective = settings.objective
    if objective.normalise == "token":
        return lambda weight, length: weight * tokens
    if objective.normalise == "constant":
        return lambda weight, length: weight * rows * objective.constant
    return lambda weight, length: weight * rows * length


def of_one_size(settings: AnyMethod, given: Mapping[str, Any]) -> AnyMethod:
    """The settings for a host whose groups all have one size, where a query's two prompts cannot share its G answers.

    Where only the preset says `reflection.budget=shared`, reflection costs one more group, as in the paper; if the
    user asked for it (`given`), it stays and is refused by name.
    """
    asked = given.get("reflection")
    if settings.reflection.budget != "shared" or (isinstance(asked, Mapping) and "budget" in asked):
        return settings
    return settings.model_copy(update={"reflection": settings.reflection.model_copy(update={"budget": "extra"})})
