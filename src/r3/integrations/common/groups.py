"""From another trainer's answers to verified groups, and from the method's weights to those of the trainer's loss.

Prompts (plain text, or chat turns as dictionaries) are put into r3's terms and back. `importance` has the weights of
stale tokens, for trainers whose loss clips around the policy at the start of the step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from r3.algorithm import Prompt
from r3.method.objective import LOG_RATIO_LIMIT
from r3.method.settings import MethodSettings, ObjectiveSettings
from r3.samples import FloatArray, Group, IntArray, Message, PromptText, Sample

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


def prompt_id(prompt: Any) -> str:
    """A hash of the prompt as id: in data without ids, equal prompts are the same query."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def text_of(prompt: Any) -> PromptText:
    """The prompt as text or messages."""
    if isinstance(prompt, str):
        return prompt
    for turn in prompt:
        if not isinstance(turn["content"], str):
            raise ValueError("R³ trains on text: a prompt's content must be a string, not a list of parts")
    return tuple(Message(turn["role"], turn["content"]) for turn in prompt)


def turns_of(text: PromptText) -> str | list[dict[str, str]]:
    """The prompt in the form of the trainer's data."""
    if isinstance(text, str):
        return text
    return [turn.as_dict() for turn in text]


def importance(
    proximal_BC: Tensor, behaviour_BC: Tensor, mask_BC: Tensor, settings: ObjectiveSettings, *, by_sequence: bool
) -> Tensor:
    """w of `r3.method.objective`: min(π_prox/π_behave, C), and 0 beyond the gate. B rows, C tokens."""
    log_BC = (proximal_BC - behaviour_BC) * mask_BC
    if by_sequence:
        log_BC = (log_BC.sum(1, keepdim=True) / mask_BC.sum(1, keepdim=True)).expand_as(log_BC)
    weight_BC = log_BC.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=settings.importance_cap)
    if settings.ratio_gate is not None:
        weight_BC = weight_BC.masked_fill(log_BC.abs() > math.log(settings.ratio_gate), 0.0)
    return weight_BC


def importance_sums(weight_T: Tensor) -> Tensor:
    """Sums over replayed tokens' weights for `importance_metrics`; those of several processes can be added."""
    n_T = torch.ones_like(weight_T)
    return torch.stack([x.sum() for x in (weight_T, weight_T.square(), n_T * (weight_T == 0), n_T)])


def importance_metrics(sums: Tensor) -> dict[str, float]:
    """Mean weight, share of gated tokens and effective sample size of the replayed tokens."""
    total, squares, gated, n = sums.tolist()
    return {
        "replay/importance_mean": total / n,
        "replay/gated_share": gated / n,
        "replay/ess": total**2 / (n * squares) if squares else 0.0,
    }
