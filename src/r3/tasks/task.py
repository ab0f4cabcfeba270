"""What a task is: training queries, held-out queries, and a judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from r3.samples import Query
from r3.verify.judge import Judge


class Task(Protocol):
    """Where queries come from and which answers are right. Training and held-out queries are disjoint."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Sequence[Query]: ...

    @property
    def heldout(self) -> Sequence[Query]: ...

    @property
    def judge(self) -> Judge: ...


@dataclass(frozen=True, slots=True)
class ChosenTask:
    """A task of parts: some of another's problems, say, or another's problems under a judge of its own."""

    name: str
    train: Sequence[Query]
    heldout: Sequence[Query]
    judge: Judge

    @staticmethod
    def of(task: Task, *, train: Sequence[Query] | None = None, judge: Judge | None = None) -> ChosenTask:
        """The task, with other training problems or another judge."""
        return ChosenTask(task.name, task.train if train is None else train, task.heldout, judge or task.judge)
