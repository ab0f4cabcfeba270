"""What a task is: training queries, held-out queries, and a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from r3.samples import Query
from r3.verify.base import Verdict

__all__ = ["Task", "Verdict"]


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

    def close(self) -> None:
        """Let go of workers, if there are any."""
        ...
