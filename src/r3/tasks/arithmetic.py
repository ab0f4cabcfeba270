r"""The embedded task: chains of sums with written working.

    question   7+5+8=
    response   7+5=12+8=20#20

The answer is what stands after the last `#`. Difficulty is the number of terms: one step for each after the first, and
one slip anywhere spoils the answer, so success falls as (1 − slip rate)^steps, and a step done better helps every
problem. A step may be written again (`12+8=10?12+8=20`: the last result counts), so that working varies in length and
the longest is cut by the length limit.

Problems are split by a hash of their text into `warm` (what the bundled model was warm-started on), `train` and
`heldout`: disjoint by construction, whatever the seeds.

Graded arithmetic for any chat model: sums and differences of two-digit numbers, to be worked out step by step.

    question   Compute 34 + 58 - 7.
    solution   34 + 58 = 92
               92 - 7 = 85
               \boxed{85}

Difficulty is the number of terms, as in the embedded task; the written solution is what a supervised warm start learns
from. Problems are split by a hash of their text into `warm`, `train` and `heldout`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.files import boxed_verdict
from r3.tasks.settings import ArithmeticSettings, GradedArithmeticSettings
from r3.tasks.task import first_steps, helped
from r3.verify.judge import Judge, PlainJudge, Verdict

Split = Literal["warm", "train", "heldout"]
HELDOUT_SEED = 0
"""The same problems are held out whatever the run's seed, so that runs can be compared."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain of sums."""

    terms: tuple[int, ...]

    @property
    def question(self) -> str:
        """The plain prompt."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def answer(self) -> str:
        """The exact result, as a response must write it."""
        return str(sum(self.terms))

    @property
    def steps(self) -> list[str]:
        """The working without a slip, step by step; joined they are all of it but the answer.

        >>> Problem((7, 5, 8)).steps
        ['7+5=12', '+8=20']
        """
        totals = list(accumulate(self.terms))
        steps = [f"+{term}={total}" for term, total in zip(self.terms[1:], totals[1:], strict=True)]
        return [str(self.terms[0]) + steps[0], *steps[1:]]


def split_of(question: str) -> Split:
    """Which split a question belongs to: 60 % warm, 20 % train, 20 % held out, by hash."""
    bucket = hashlib.sha256(question.encode()).digest()[0] % 5
    return "heldout" if bucket == 0 else "train" if bucket == 1 else "warm"


def draw_problem(rng: random.Random, terms: int, split: Split) -> Problem:
    """One problem of a split: this many terms from 1 to a largest one, which is itself drawn from 3 to 9.

    Small terms mean few carries, so that problems of one length still differ in how hard they are.
    """
    while True:
        largest = rng.randint(3, 9)
        problem = Problem(tuple(rng.randint(1, largest) for _ in range(terms)))
        if split_of(problem.question) == split:
            return problem


def problem_set(seed: int, count: int, difficulty: Sequence[int], split: Split) -> list[Problem]:
    """`count` distinct problems, the difficulties in turn, the same for the same arguments.

    >>> [p.question for p in problem_set(0, 2, (3, 5), "heldout")]
    ['3+2+2=', '5+1+6+3+2=']
    """
    rng = random.Random(f"{split}-{seed}")
    problems: dict[str, Problem] = {}
    for _ in range(50 * count):
        if len(problems) == count:
            break
        problem = draw_problem(rng, difficulty[len(problems) % len(difficulty)], split)
        problems.setdefault(problem.question, problem)
    if len(problems) < count:
        raise TaskError(
            f"task.difficulty={list(difficulty)}: there are fewer than {count} different sums of so few terms; ask for "
            "fewer (task.size, task.heldout) or for more terms"
        )
    return list(problems.values())


def judge(answer: str, response: str) -> Verdict:
    """Right if the response ends in `#` and the exact result.

    >>> [judge("12", text).reason for text in ("7+5=12#12", "7+5=12", "7+5=13#13")]
    ['match', 'no answer', 'wrong']
    """
    _, mark, given = response.rpartition("#")
    if not mark:
        return Verdict(False, "no answer")
    right = given.strip() == answer
    return Verdict(right, "match" if right else "wrong")


class ArithmeticTask:
    """Chains of sums for training, and others for evaluation."""

    name = "arithmetic"

    def __init__(self, settings: ArithmeticSettings, seed: int) -> None:
        if not settings.difficulty or min(settings.difficulty) < 2:
            raise TaskError(f"task.difficulty={settings.difficulty}: give at least one number of terms, each 2 or more")
        levels = settings.difficulty
        self.train: Sequence[Query] = _queries(problem_set(seed, settings.size, levels, "train"))
        self.heldout: Sequence[Query] = _queries(problem_set(HELDOUT_SEED, settings.heldout, levels, "heldout"))
        self.judge: Judge = PlainJudge(lambda query, text: judge(query.answer, text))


def _queries(problems: Sequence[Problem]) -> list[Query]:
    return [
        Query(
            problem.question,
            problem.question,
            problem.answer,
            demonstration=f"{''.join(problem.steps)}#{problem.answer}",
            hints=first_steps(problem.steps, ""),
        )
        for problem in problems
    ]


# ------------------------------------------------------------ graded arithmetic


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
