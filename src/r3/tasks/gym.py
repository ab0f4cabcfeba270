"""Puzzles of reasoning-gym (an optional extra): any of its families, judged by the family's own scorer.

Answers are read from the last \\boxed{} and are right if the scorer gives them full marks: part marks for nearly right
answers are not for us, whose method knows right and wrong alone. Problems are split by a hash of their text into
`warm`, `train` and `heldout`, so the three never share one, whatever the seeds. `solutions` has written-out
procedures for some families, for a supervised warm start.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.arithmetic import HELDOUT_SEED, Split, split_of
from r3.tasks.settings import ReasoningGymSettings
from r3.tasks.solutions import SOLUTIONS
from r3.tasks.written import helped
from r3.verify.judge import Judge, PlainJudge, Verdict
from r3.verify.maths import boxed_answer

FULL_MARKS = 0.999
REFUSAL = (ValueError, TypeError, AssertionError, IndexError)
"""What a family raises over options that it cannot serve."""
BAD_ANSWER = (ValueError, TypeError, SyntaxError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a scorer may raise over a text that its author did not think of; such an answer is wrong."""


class ReasoningGymTask:
    """Puzzles of one family for training, and others for evaluation."""

    def __init__(self, settings: ReasoningGymSettings, seed: int) -> None:
        self._settings = settings
        self.name = f"reasoning-gym-{settings.family}"
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._scorer = _dataset(settings, seed=0)
        self.train: Sequence[Query] = self._problems(settings.size, settings.split, seed)
        self.heldout: Sequence[Query] = self._problems(settings.heldout, "heldout", HELDOUT_SEED)
        self.judge: Judge = PlainJudge(self._verdict)

    def _verdict(self, query: Query, completion: str) -> Verdict:
        boxed = boxed_answer(completion)
        if boxed.reason:
            return Verdict(False, boxed.reason)
        try:
            marks = float(self._scorer.score_answer(boxed.answer, self._entries[query.id]))
        except BAD_ANSWER:
            return Verdict(False, "error")
        return Verdict(True, "match") if marks >= FULL_MARKS else Verdict(False, "different")

    def _problems(self, count: int, split: Split, seed: int) -> list[Query]:
        """`count` distinct problems of a split, the same for the same arguments."""
        prompting = self._settings.prompting
        write = SOLUTIONS.get(str(self._settings.family))
        found: dict[str, Query] = {}
        for entry in self._drawn(50 * count, f"{split}-{seed}"):
            if len(found) == count:
                break
            question = str(entry["question"]).strip()
            if split_of(question) != split or question in found or entry["answer"] == "":  # no box can hold nothing
                continue
            columns: dict[str, Any] = {"problem": question}
            if write is not None:
                columns["solution"] = write(entry)
            found[question] = helped(prompting.query(question, question, str(entry["answer"]), columns))
            self._entries[question] = entry
        if len(found) < count:
            raise TaskError(
                f"task.family={self._settings.family}: only {len(found)} different problems for {split} were found, "
                f"not {count}; ask for fewer (task.size, task.heldout) or make them larger with task.options"
            )
        return list(found.values())

    def _drawn(self, most: int, name: str) -> Iterator[Mapping[str, Any]]:
        dataset = _dataset(self._settings, seed=random.Random(name).getrandbits(31), size=most)
        for place in range(most):
            try:
                entry = dataset[place]
            except REFUSAL as error:  # some families see only when they draw that their options leave them nothing
                raise _refused(self._settings, error) from error
            yield entry


def _dataset(settings: ReasoningGymSettings, *, seed: int, size: int = 1) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"task.name=reasoning-gym needs reasoning-gym, whole: pip install 'r3-rl[reasoning-gym]' ({error})"
        ) from error
    try:
        return gym.create_dataset(settings.family, **settings.options, seed=seed, size=size)
    except REFUSAL as error:
        raise _refused(settings, error) from error


def _refused(settings: ReasoningGymSettings, error: Exception) -> TaskError:
    return TaskError(
        f"task.family={settings.family}, task.options={settings.options}: reasoning-gym refuses them ({error})"
    )
