"""A step's saved rollouts: a row a sample, with what R³ did to its group, and a summary of every group.

Whole rows are kept of the first groups only (`run.rollouts_groups`); summaries, a few hundred bytes each, of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3.method.step import MixedGroup, StepResult
from r3.samples import FloatArray, Query, Sample
from r3.train.pieces import Pieces

MOST_QUESTION = 240
"""Characters of the question in a summary: enough to know it by."""


@dataclass(frozen=True)
class StepNotes:
    """What became of a step's samples after the method: where each was stored, and how far the policy had moved."""

    ids: Mapping[int, int] = field(default_factory=dict)
    """The buffer's id of each fresh sample, by the sample's identity in this process."""
    log_ratios: Mapping[int, FloatArray] = field(default_factory=dict)
    """Per token log π/π_behave at the update, of the samples trained under the prompt they were drawn under."""
    shown: Mapping[int, Sample] = field(default_factory=dict)
    """The past attempts that reflection prompts show, by their id in the buffer."""


def rollout_rows(
    result: StepResult, tokenizer: Any, groups: int, notes: StepNotes | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of the first `groups` groups, fresh ones first, then the replayed ones."""
    pieces = Pieces(tokenizer)
    notes = notes or StepNotes()
    for number, mixed in enumerate(result.groups[:groups]):
        prompt = tokenizer.decode(mixed.group.prompt.tolist())
        attempt = _attempt(mixed, pieces, notes)
        for index, sample in enumerate(mixed.members):
            row = {"group": number, "prompt": prompt, **_row(mixed, index, sample, pieces, notes)}
            yield {**row, **attempt} if index == 0 else row


def _row(mixed: MixedGroup, index: int, sample: Sample, pieces: Pieces, notes: StepNotes) -> dict[str, Any]:
    text = sample.text if sample.text is not None else pieces.decode(sample.tokens)
    log_ratios = notes.log_ratios.get(id(sample))
    return {
        "query": sample.query_id,
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "origin": "replayed" if index >= len(mixed.group) else "fresh",
        "drawn_in": sample.context.kind,
        "replay": mixed.replay.reason,
        "id": notes.ids.get(id(sample), sample.id),
        "step": sample.step,
        "epoch": sample.epoch,
        "policy_version": sample.policy_version,
        "response": text,
        "tokens": sample.tokens.tolist(),
        "widths": pieces.widths(sample.tokens, text),
        "logprobs": [round(float(x), 5) for x in sample.logprobs],
        "entropies": None if sample.entropies is None else [round(float(x), 5) for x in sample.entropies],
        "ratios": None if log_ratios is None else np.exp(log_ratios, dtype=np.float64).round(4).tolist(),
        "finish": sample.finish,
        "outcome": sample.outcome,
        "verdict": sample.verdict,
        "reward": mixed.rewards[index],
        "reward_parts": dict(sample.reward_parts),
        "advantage": mixed.advantages[index],
    }


def _attempt(mixed: MixedGroup, pieces: Pieces, notes: StepNotes) -> dict[str, Any]:
    """The attempt that a reflection prompt shows, for the first row of its group."""
    shown = mixed.group.context.shown
    sample = notes.shown.get(shown) if shown is not None else None
    if sample is None:
        return {}
    text = pieces.decode(sample.tokens)
    return {"attempt": {"id": shown, "step": sample.step, "verdict": sample.verdict, "response": text}}


def group_summaries(result: StepResult, notes: StepNotes | None = None) -> list[dict[str, Any]]:
    """Every group of the step in short: what the rows would say without their texts and per-token numbers."""
    return [_summary(mixed, notes or StepNotes()) for mixed in result.groups]


def _summary(mixed: MixedGroup, notes: StepNotes) -> dict[str, Any]:
    members = mixed.members
    return {
        "query": mixed.group.query.id,
        "question": question(mixed.group.query)[:MOST_QUESTION],
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "replay": mixed.replay.reason,
        "fresh": len(mixed.group),
        "epoch": mixed.group.samples[0].epoch,
        "ids": [notes.ids.get(id(s), s.id) for s in members],
        "steps": [s.step for s in members],
        "versions": [s.policy_version for s in members],
        "outcomes": [s.outcome for s in members],
        "truncated": [int(s.truncated) for s in members],
        "lengths": [len(s) for s in members],
        "rewards": [round(float(x), 5) for x in mixed.rewards],
        "ranking": [_ranking(mixed, i, s) for i, s in enumerate(members)],
        "advantages": [round(float(x), 5) for x in mixed.advantages],
    }


def _ranking(mixed: MixedGroup, index: int, sample: Sample) -> float | None:
    """What SERR paid in this group; a replayed sample may carry what another group once paid it."""
    paid = sample.reward_parts.get("ranking") if index < len(mixed.group) else None
    return None if paid is None else round(float(paid), 5)


def question(query: Query) -> str:
    """What the query asks: its text, or the last user turn of its chat."""
    if isinstance(query.prompt, str):
        return query.prompt
    turns: Sequence[str] = [turn.content for turn in query.prompt if turn.role == "user"]
    return turns[-1] if turns else ""
