"""The state of `R3Trainer` while a generation batch is in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from r3.algorithm import Prompt
from r3.integrations.common.groups import Answer
from r3.samples import Group


@dataclass
class Seen:
    """What TRL computes while it makes a batch, and does not return."""

    rewards: Tensor | None = None
    """Rewards of all ranks' rows, by reward function."""
    completion_ids: list[list[int]] = field(default_factory=list)
    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Log-probs and entropies of each forward pass of the policy."""


@dataclass
class Step:
    """A generation batch in progress, on the main process: what is asked, and the answers so far."""

    queries: int
    """How many queries the batch has, without reflection prompts."""
    prompts: Sequence[Prompt]
    counts: Mapping[str, int]
    """Counts of reflection prompts, and of the reasons against more."""
    answers: list[Answer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
