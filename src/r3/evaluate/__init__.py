"""Evaluation: how often a policy is right on held-out problems, with intervals."""

from __future__ import annotations

from pydantic import Field

from r3.settings import Settings


class EvaluateSettings(Settings):
    """Held-out accuracy under the plain prompt, during and after training."""

    every: int = Field(0, ge=0)
    """Evaluate every n-th step; 0 only before and after."""
    every_tokens: int = Field(0, ge=0)
    """Evaluate each time this many more tokens have been generated in training; 0 to go by steps alone."""
    samples: int = Field(1, ge=1, le=100_000)
    """Answers to each held-out problem; with several, pass@1 is their mean and pass@k is reported for k = samples."""
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    """Longest held-out answer, e.g. more than in training, where the limit saves time; None: rollout.max_tokens."""
    temperature: float = Field(1.0, ge=0, le=1e3)
    """Sampling temperature of the evaluation; 0 is greedy."""
