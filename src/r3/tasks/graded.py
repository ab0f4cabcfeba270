"""Graded arithmetic for any chat model: sums and differences of two-digit numbers, to be worked out step by step.

    question   Compute 34 + 58 - 7.
    solution   34 + 58 = 92
               92 - 7 = 85
               \\boxed{85}

Difficulty is the number of terms, as in the embedded task; the written solution is what a supervised warm start learns
from. Problems are split by a hash of their text into `warm`, `train` and `heldout`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.arithmetic import HELDOUT_SEED, Split, split_of
from r3.tasks.files import boxed_verdict
from r3.tasks.settings import GradedArithmeticSettings
from r3.tasks.written import helped
from r3.verify.judge import Judge, PlainJudge

LARGEST = 99


class GradedArithmeticTask:
    """Chains of sums and differences for training, and others for evaluation."""

    name = "graded-arithmetic"

    def __init__(self, settings: GradedArithmeticSettings, seed: int) -> None:
        if not settings.difficulty or min(settings.difficulty) < 2:
            raise TaskError(f"task.difficulty={settings.difficulty}: give at least one number of terms, each 2 or more")
        self.train: Sequence[Query] = _problems(settings, settings.size, settings.split, seed)
        self.heldout: Sequence[Query] = _problems(settings, settings.heldout, "heldout", HELDOUT_SEED)
        self.judge: Judge = PlainJudge(boxed_verdict)


def _problems(settings: GradedArithmeticSettings, count: int, split: Split, seed: int) -> list[Query]:
    """`count` distinct problems of a split, the difficulties in turn."""
    rng = random.Random(f"graded-{split}-{seed}")
    prompting = settings.prompting
    found: dict[str, Query] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        terms = [rng.randint(1, LARGEST)]
        terms += [rng.choice((1, -1)) * rng.randint(1, LARGEST) for _ in range(_level(settings, len(found)) - 1)]
        question = f"Compute {expression(terms)}."
        if split_of(question) == split and question not in found:
            columns = {"problem": question, "solution": solution(terms)}
            found[question] = helped(prompting.query(question, question, str(sum(terms)), columns))
    if len(found) < count:
        raise TaskError(
            f"task.difficulty={settings.difficulty}: fewer than {count} such problems were found; ask for fewer"
        )
    return list(found.values())


def _level(settings: GradedArithmeticSettings, place: int) -> int:
    return settings.difficulty[place % len(settings.difficulty)]


def expression(terms: Sequence[int]) -> str:
    """The terms as people write them.

    >>> expression([34, 58, -7])
    '34 + 58 - 7'
    """
    first, *rest = terms
    return str(first) + "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in rest)


def solution(terms: Sequence[int]) -> str:
    """The working, a line for each term after the first, without the boxed answer.

    >>> solution([34, 58, -7])
    '34 + 58 = 92\\n92 - 7 = 85'
    """
    total, lines = terms[0], []
    for term in terms[1:]:
        lines.append(f"{expression([total, term])} = {total + term}")
        total += term
    return "\n".join(lines)
