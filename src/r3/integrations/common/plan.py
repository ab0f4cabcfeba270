"""From a trainer's rows to verified groups, and from what the method decided back to rows: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from r3.method.settings import MethodSettings
from r3.method.step import StepResult, WeightedSample
from r3.samples import PLAIN, Context, FloatArray, Group, IntArray, Query, Sample


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of the batch: the query it puts, and whether it shows a past failure."""

    query: Query
    epoch: int
    context: Context = PLAIN


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
    """What its reward is the sum of, ready to add."""


def to_groups(asked: Sequence[tuple[Asked, Sequence[Answer]]], *, version: int, step: int) -> list[Group]:
    """The answers to each prompt as a verified group, in order. A reflection group learns its query's plain prompt."""
    plain = {ask.query.id: answers[0].prompt for ask, answers in asked if ask.context.kind == "plain"}
    groups = []
    for ask, answers in asked:
        samples = tuple(_sample(ask, answer, version, step) for answer in answers)
        reflecting = ask.context.kind == "reflection"
        groups.append(
            Group(ask.query, samples, answers[0].prompt, ask.context, plain[ask.query.id] if reflecting else None)
        )
    return groups


def _sample(ask: Asked, answer: Answer, version: int, step: int) -> Sample:
    return Sample(
        ask.query.id,
        answer.tokens,
        answer.logprobs,
        answer.entropies,
        finish="length" if answer.truncated else "stop",
        outcome=answer.right,
        reward=math.fsum(answer.rewards.values()),
        reward_parts=answer.rewards,
        context=ask.context,
        policy_version=version,
        step=step,
        epoch=ask.epoch,
    )


def placed(result: StepResult) -> Iterator[tuple[int, int, WeightedSample]]:
    """Every sequence to train on, with the group it belongs to and its place among that group's members."""
    weighted = iter(result.weighted)
    following = next(weighted, None)
    for number, mixed in enumerate(result.groups):
        for place, member in enumerate(mixed.members):
            # In the order of groups and members, skipping those without a gradient: a member may come twice, since a
            # reflection answer can be trained under both prompts, and the same past sample may join two groups.
            while following is not None and following.sample is member and _of(mixed.group, following):
                yield number, place, following
                following = next(weighted, None)
    assert following is None, "a weighted sample belongs to no group"


def _of(group: Group, weighted: WeightedSample) -> bool:
    return weighted.prompt is group.prompt or weighted.prompt is group.plain_prompt


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
