"""Accuracy on held-out problems under the plain prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.evaluate.intervals import Accuracy
from r3.rollout.protocol import Engine, Request, Sampling
from r3.samples import IntArray, Query
from r3.tasks.base import Task


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation found."""

    accuracy: Accuracy
    truncated: float
    mean_tokens: float

    def metrics(self) -> dict[str, float]:
        low, high = self.accuracy.interval
        return {
            "heldout/accuracy": self.accuracy.share,
            "heldout/right": self.accuracy.right,
            "heldout/total": self.accuracy.total,
            "heldout/low": low,
            "heldout/high": high,
            "heldout/truncated": self.truncated,
            "heldout/tokens": self.mean_tokens,
        }


def evaluate(
    engine: Engine,
    task: Task,
    prompts: Sequence[tuple[Query, IntArray]],
    tokenizer: Any,
    sampling: Sampling,
    *,
    seed: int,
) -> HeldOut:
    """Answer every prompt once and count the right answers. The same seed asks in the same way."""
    requests = [Request(tokens, 1, seed + place) for place, (_, tokens) in enumerate(prompts)]
    right = truncated = tokens = answers = 0
    for response in engine.generate(requests, sampling):
        answers += 1
        tokens += len(response.tokens)
        if response.finish == "length":
            truncated += 1
            continue
        text = tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True)
        right += task.verify(prompts[response.request][0], text).right
    return HeldOut(Accuracy(right, answers), truncated / max(1, answers), tokens / max(1, answers))
