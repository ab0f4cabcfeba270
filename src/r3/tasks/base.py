"""What a task is: training queries, held-out queries, and a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from r3.samples import Query


class TaskError(ValueError):
    """A task that cannot be used; the message names the setting and the fix."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right or wrong, and why."""

    right: bool
    reason: str


class Task(Protocol):
    """Where queries come from and which answers are right. Training and held-out queries are disjoint."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Sequence[Query]: ...

    @property
    def heldout(self) -> Sequence[Query]: ...

    def verify(self, query: Query, completion: str) -> Verdict:
        """Whether a complete (not truncated) response is right. Called from several threads at once."""
        ...
