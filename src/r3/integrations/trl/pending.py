"""What `R3Trainer` holds on to while a generation batch is under way."""

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
    """Of all ranks' rows, by reward function."""
    completion_ids: list[list[int]] = field(default_factory=list)
    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Log-probs and entropies of each forward pass of the policy."""


@dataclass
class Step:
    """A generation batch on its way, on the main process: what is being asked, and the answers so far."""

    queries: int
    """How many the batch holds, reflection prompts apart."""
    prompts: Sequence[Prompt]
    counts: Mapping[str, int]
    """How many reflection prompts there were, and why not more."""
    answers: list[Answer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
