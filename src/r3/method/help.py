"""What helps a group that found nothing: a demonstration (LUFFY), a hint (SAGE), a critique (Critique-GRPO).

    demonstration   LUFFY, arXiv 2504.14945: a right answer from the data joins the group of its query, as if drawn with
                    probability 1: log π_behave = 0 for each of its tokens, the end-of-text token included
    hint            SAGE, arXiv 2602.03143: a group that solved none is drawn again with the first hint, then with the
                    second, …, until some of it are right; that group takes the plain one's place, trained under its
                    own prompt, on-policy
    critique        Critique-GRPO, arXiv 2506.03106: each failure is shown to the policy with what was said of it; the
                    first right refinement joins the plain group, trained under the plain prompt

What joins is compared with the group's own answers, and its tokens have the objective of `objective.shaping`:
A · x/(x + β) of x = π(token) in both papers.

Departures from the sources, and choices they leave open:
- LUFFY and Critique-GRPO put what joins in the place of a fresh answer; here it comes beside them, so that no answer is
  generated in vain. Fewer answers to a query (rollout.group_size) make the published group.
- A demonstration must be right by the judge, like any answer, unless it is said to be trusted; the papers trust it.
- Demonstrations are the data's and not the policy's: they are not stored in the buffer. Hinted answers and refinements
  are, under their own kind of context, so that the pass rate of the plain prompt stays what it is.
- If no hint brings a right answer, the plain group stays where it is and the hinted ones leave the loss.
- A wrong refinement never joins: beside wrong answers it would teach nothing.
- A refinement has no log-probs under the plain prompt: nothing but the shaping bounds it, as with any answer that was
  drawn under another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from r3.method.mixed import Origin
from r3.method.reflection import Attempt, Tokenizer, asked_again, fitted, tokenized
from r3.method.settings import CritiqueSettings, DemonstrationSettings, HintSettings, MethodSettings, ReflectionSettings
from r3.samples import Group, IntArray, PromptText, Query, Sample

Demonstrations = Mapping[int, Sample]
"""Judged ones, by the index of the plain group that each is to join."""


@dataclass(frozen=True, slots=True)
class Help:
    """What becomes of the groups of a step that were helped."""

    joining: Mapping[int, tuple[tuple[Sample, Origin], ...]]
    """What joins a plain group, by its index, and where that comes from."""
    replaced: frozenset[int]
    """Plain groups whose place a hinted one takes."""
    apart: frozenset[int]
    """Hinted groups that solved none, and refinements, which are part of the loss only where they join."""


def help_of(groups: Sequence[Group], settings: MethodSettings, demonstrations: Demonstrations) -> Help:
    """What joins which group of a step, and which hinted group takes whose place."""
    joining: dict[int, list[tuple[Sample, Origin]]] = {}
    replaced, apart = set(), set()
    for index, group in enumerate(groups):
        if group.follows is None:
            continue
        if group.context.kind == "hint" and not group.solve_none and group.follows not in replaced:
            replaced.add(group.follows)
            continue
        apart.add(index)
        refined = joining.setdefault(group.follows, []) if group.context.kind == "critique" else []
        for sample in group.samples:
            if sample.outcome and len(refined) < settings.critique.joins:
                refined.append((sample, "critique"))
    for index, sample in demonstrations.items():
        if sample.outcome:
            joining.setdefault(index, []).append((sample, "demonstration"))
    return Help({index: tuple(samples) for index, samples in joining.items()}, frozenset(replaced), frozenset(apart))


def demonstration_of(
    query: Query,
    tokenizer: Tokenizer,
    end: int,
    settings: DemonstrationSettings,
    *,
    version: int,
    step: int,
    epoch: int,
) -> Sample | None:
    """A query's demonstration as an answer that is still to be judged; None where it has none, or one too long."""
    if not query.demonstration:
        return None
    tokens = [*tokenizer.encode(query.demonstration, add_special_tokens=False), end]
    if settings.max_tokens is not None and len(tokens) > settings.max_tokens:
        return None
    return Sample(
        query.id,
        np.asarray(tokens, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
        np.zeros(len(tokens), dtype=np.float32),
        policy_version=version,
        step=step,
        epoch=epoch,
        text=query.demonstration,
    )


def hinted_prompt(
    query: Query, level: int, tokenizer: Tokenizer, settings: HintSettings
) -> tuple[PromptText, IntArray] | None:
    """The query with its hint of this level, counted from 0; None where there is none, or it does not fit."""
    if level >= min(len(query.hints), settings.levels or len(query.hints)):
        return None
    text = asked_again(query, settings.template, hint=query.hints[level])
    tokens = tokenized(text, query, tokenizer)
    return (text, np.asarray(tokens, dtype=np.int32)) if len(tokens) <= settings.max_prompt_tokens else None


def to_refine(group: Group, settings: CritiqueSettings) -> list[Sample]:
    """The failures of a plain group that are refined."""
    if settings.when == "solve_none" and not group.solve_none:
        return []
    return [sample for sample in group.samples if not sample.outcome][: settings.attempts]


def critique_prompt(
    query: Query, failure: Sample, tokenizer: Tokenizer, settings: CritiqueSettings
) -> tuple[PromptText, IntArray] | None:
    """The query with a failure and what is said of it; None where nothing is, or where it does not fit."""
    said = {"verdict": failure.feedback or failure.reason, "gold": query.answer, "column": query.feedback}
    feedback = said[settings.feedback].strip()
    if not feedback:
        return None
    layout = ReflectionSettings(
        template=settings.wording, cut_marker=settings.cut_marker, max_prompt_tokens=settings.max_prompt_tokens
    )
    prompt = fitted(query, Attempt(failure.tokens.tolist(), feedback, failure.truncated), tokenizer, layout)
    return None if prompt is None else (prompt[0], np.asarray(prompt[1], dtype=np.int32))
