"""Accuracy on held-out problems under the plain prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3.evaluate.passk import estimate, pass_at_k, wilson
from r3.judging import Answer, drawn, judge_all
from r3.rollout.protocol import Engine, Request, Response, Sampling
from r3.samples import IntArray, Query
from r3.tasks.task import Task
from r3.verify.judge import Verdict

RESAMPLES = 1_000
"""Draws for the interval over problems; few, since an evaluation during training is one of many."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation metrics."""

    right: Sequence[int]
    """Right answers to each problem."""
    samples: int
    """Answers to each problem."""
    truncated: float
    mean_tokens: float
    rewards: Mapping[str, float]
    """What each of several reward functions gave, weighted: the mean over all answers, by name."""

    @property
    def total(self) -> int:
        return len(self.right) * self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of pass@1; with several answers to a problem, which are alike, problems are drawn again."""
        if self.samples == 1:
            return wilson(sum(self.right), self.total)
        mean = estimate([right / self.samples for right in self.right], seed=0, resamples=RESAMPLES)
        return mean.low, mean.high

    def metrics(self) -> dict[str, Any]:
        low, high = self.interval
        metrics: dict[str, Any] = {
            "heldout/accuracy": sum(self.right) / self.total,
            "heldout/right": sum(self.right),
            "heldout/right_each": list(self.right),
            "heldout/total": self.total,
            "heldout/low": low,
            "heldout/high": high,
            "heldout/truncated": self.truncated,
            "heldout/tokens": self.mean_tokens,
            **{f"heldout/reward/{name}": mean for name, mean in sorted(self.rewards.items())},
        }
        if self.samples > 1:
            k = self.samples
            passed = sum(pass_at_k(k, right, k) for right in self.right) / len(self.right)
            metrics |= {"heldout/samples": k, f"heldout/pass@{k}": passed}
        return metrics


def evaluate(
    engine: Engine,
    task: Task,
    prompts: Sequence[tuple[Query, IntArray]],
    tokenizer: Any,
    sampling: Sampling,
    *,
    samples: int = 1,
    seed: int,
) -> HeldOut:
    """Answer every prompt `samples` times and count the right answers. The same seed asks in the same way."""
    requests = [Request(tokens, samples, seed + place) for place, (_, tokens) in enumerate(prompts)]
    asked = [(query, task.judge) for query, _ in prompts]
    right = [0] * len(prompts)
    truncated = tokens = 0
    rewards: Counter[str] = Counter()

    def keep(answer: Answer[Response], verdict: Verdict) -> None:
        nonlocal truncated, tokens
        tokens += len(answer.source.tokens)
        truncated += answer.truncated
        rewards.update(verdict.scores or {})
        right[answer.source.request] += verdict.right and not answer.truncated

    judge_all(drawn(engine, requests, sampling, tokenizer, asked), keep)
    answers = max(1, len(prompts) * samples)
    means = {name: total / answers for name, total in rewards.items()}
    return HeldOut(right, samples, truncated / answers, tokens / answers, means)
