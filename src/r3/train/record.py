"""A step's saved rollouts: one row per sample, with what R³ did to its group, and a summary of every group.

Whole rows are kept of the first groups only (`run.rollouts_groups`); summaries, a few hundred bytes each, of all.

`TokenTexts` says which characters of a response each of its tokens wrote, for readers without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3.method.mixed import Member, MixedGroup, StepResult
from r3.samples import FloatArray, IntArray, Query, Sample

MOST_QUESTION = 240
"""Characters of the question and of the reference answer in a summary: enough to recognise them."""


@dataclass(frozen=True)
class StepNotes:
    """What the rows have besides the result: how far the policy had moved, and what reflection prompts show."""

    log_ratios: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)
    """Per token log π/π_behave at the update, by group and member, of those trained under the prompt they were drawn
    under."""
    shown: Mapping[int, Sample] = field(default_factory=dict)
    """The past attempts that reflection prompts show, by their id in the buffer."""


def rollout_rows(
    result: StepResult, tokenizer: Any, groups: int, notes: StepNotes | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of the first `groups` groups, fresh ones first, then the replayed ones."""
    texts = TokenTexts(tokenizer)
    notes = notes or StepNotes()
    for number, mixed in enumerate(result.groups[:groups]):
        prompt = tokenizer.decode(mixed.group.prompt.tolist())
        attempt = _attempt(mixed, texts, notes)
        for index in range(len(mixed.members)):
            row = {
                "group": number,
                "prompt": prompt,
                **_row(mixed, index, texts, notes.log_ratios.get((number, index))),
            }
            yield {**row, **attempt} if index == 0 else row


def _row(mixed: MixedGroup, index: int, texts: TokenTexts, log_ratios: FloatArray | None) -> dict[str, Any]:
    member, joined = mixed.members[index], index >= len(mixed.group)
    sample = member.sample
    text = sample.text if sample.text is not None else texts.decode(sample.tokens)
    return {
        "query": sample.query_id,
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "origin": member.origin if joined else "fresh",
        "drawn_in": sample.context.kind,
        "replay": mixed.replay,
        "id": sample.id,
        "step": sample.step,
        "epoch": sample.epoch,
        "policy_version": sample.policy_version,
        "response": text,
        "tokens": sample.tokens.tolist(),
        "widths": texts.widths(sample.tokens, text),
        "logprobs": [round(float(x), 5) for x in sample.logprobs],
        "entropies": _rounded(sample.entropies),
        "ratios": None if log_ratios is None else np.exp(log_ratios, dtype=np.float64).round(4).tolist(),
        "finish": sample.finish,
        "outcome": sample.outcome,
        "verdict": sample.verdict,
        "reward": member.reward,
        "reward_parts": dict(sample.reward_parts),
        "advantage": member.advantage,
        "token_advantages": _rounded(member.token_advantages),
    }


def _rounded(values: FloatArray | None) -> list[float] | None:
    return None if values is None else [round(float(x), 5) for x in values]


def _attempt(mixed: MixedGroup, texts: TokenTexts, notes: StepNotes) -> dict[str, Any]:
    """The attempt that a reflection prompt shows, for the first row of its group."""
    shown = mixed.group.context.shown
    sample = notes.shown.get(shown) if shown is not None else None
    if sample is None:
        return {}
    text = texts.decode(sample.tokens)
    return {"attempt": {"id": shown, "step": sample.step, "verdict": sample.verdict, "response": text}}


def group_summaries(result: StepResult) -> list[dict[str, Any]]:
    """A summary of every group of the step: the rows without their texts and per-token numbers."""
    return [_summary(mixed) for mixed in result.groups]


def _summary(mixed: MixedGroup) -> dict[str, Any]:
    samples = [member.sample for member in mixed.members]
    return {
        "query": mixed.group.query.id,
        "question": question(mixed.group.query)[:MOST_QUESTION],
        "answer": mixed.group.query.answer[:MOST_QUESTION],
        "context": mixed.group.context.kind,
        "shown": mixed.group.context.shown,
        "replay": mixed.replay,
        "fresh": len(mixed.group),
        "origins": [member.origin for member in mixed.joined],
        "epoch": mixed.group.samples[0].epoch,
        "ids": [s.id for s in samples],
        "steps": [s.step for s in samples],
        "versions": [s.policy_version for s in samples],
        "outcomes": [s.outcome for s in samples],
        "truncated": [int(s.truncated) for s in samples],
        "lengths": [len(s) for s in samples],
        "rewards": [round(float(m.reward), 5) for m in mixed.members],
        "ranking": [_ranking(m) for m in mixed.members],
        "advantages": [round(float(m.advantage), 5) for m in mixed.members],
    }


def _ranking(member: Member) -> float | None:
    """What SERR paid in this group; a replayed sample may carry what another group once paid it."""
    paid = None if member.origin == "replayed" else member.sample.reward_parts.get("ranking")
    return None if paid is None else round(float(paid), 5)


def question(query: Query) -> str:
    """What the query asks: its text, or the last user turn of its chat."""
    if isinstance(query.prompt, str):
        return query.prompt
    turns: Sequence[str] = [turn.content for turn in query.prompt if turn.role == "user"]
    return turns[-1] if turns else ""


_UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that are not yet a character."""


class TokenTexts:
    """A tokenizer's texts of single tokens, each asked for once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        # Some decoders drop a leading space: a token's own text is what it adds behind another one.
        self._before: list[int] = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._before_text: str = tokenizer.decode(self._before)

    def decode(self, tokens: IntArray) -> str:
        """The response's text."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def widths(self, tokens: IntArray, text: str) -> list[int] | None:
        """How many characters of `text` each token wrote: 0 for special tokens and for the first bytes of a character.

        None where the text is not what the tokens say one by one (a tokenizer that cleans up after itself).
        """
        widths: list[int] = []
        waiting: list[int] = []
        at = 0
        for token in tokens.tolist():
            written = "" if token in self._special else self._text(token)
            if waiting or _UNFINISHED in written:
                waiting.append(token)
                written = self._tokenizer.decode(waiting)
                if _UNFINISHED in written and len(waiting) < 4:  # no character has more bytes
                    widths.append(0)
                    continue
                waiting = []
            if not text.startswith(written, at):
                return None
            widths.append(len(written))
            at += len(written)
        return widths if at == len(text) or text[at:] == _UNFINISHED * (len(text) - at) else None

    def _text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            after = str(self._tokenizer.decode([*self._before, token]))
            follows = after.startswith(self._before_text)
            known = after[len(self._before_text) :] if follows else str(self._tokenizer.decode([token]))
            self._texts[token] = known
        return known
