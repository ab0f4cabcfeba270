r"""A language of little programs over a list of numbers, for a model with a token per character.

    question   sort, add, drop:
    response   x=sorted(x)
               x=[v+1 for v in x]
               x=x[1:]

The response is the body of a function of the list x, whose value is x at the end. It is run against three lists in the
sandbox that judges all code; any program that does the same is right. Difficulty is the number of steps.

Each word has two readings: to drop may be to leave out the first number or the last. The written solutions of the
split `warm` take either, by chance, so that a warm start teaches how programs are written but not what is meant: that
only the tests tell. Problems are split by a hash of their text into `warm`, `train` and `heldout`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.arithmetic import HELDOUT_SEED, Split, split_of
from r3.tasks.code import code_verifier
from r3.tasks.settings import TinyCodeSettings
from r3.tasks.written import first_steps
from r3.verify.judge import Judge, Verdict

STEPS: dict[str, tuple[str, str, Callable[[list[int]], list[int]]]] = {
    "add": ("x=[v+1 for v in x]", "x=x+[1]", lambda x: [v + 1 for v in x]),
    "drop": ("x=x[1:]", "x=x[:-1]", lambda x: x[1:]),
    "skip": ("x=x[::2]", "x=x[1::2]", lambda x: x[::2]),
    "sort": ("x=sorted(x)", "x=sorted(x)[::-1]", sorted),
    "reverse": ("x=x[::-1]", "x=[-v for v in x]", lambda x: x[::-1]),
    "twice": ("x=x+x", "x=x+x[::-1]", lambda x: x + x),
    "double": ("x=[v*2 for v in x]", "x=[v*v for v in x]", lambda x: [v * 2 for v in x]),
    "head": ("x=x[:4]", "x=x[-4:]", lambda x: x[:4]),
    "wrap": ("x=x+x[:1]", "x=x[-1:]+x", lambda x: x + x[:1]),
}
"""Each word: the line for what is meant, that for the other reading, and what it does to a list."""
LISTS = 3
SHORTEST = 2


class TinyCodeTask:
    """Little programs for training, and others for evaluation."""

    name = "code-tiny"

    def __init__(self, settings: TinyCodeSettings, seed: int) -> None:
        if not settings.difficulty or min(settings.difficulty) < 1:
            raise TaskError(f"task.difficulty={settings.difficulty}: give at least one number of steps, each 1 or more")
        self.train: Sequence[Query] = _problems(settings.difficulty, settings.size, settings.split, seed)
        self.heldout: Sequence[Query] = _problems(settings.difficulty, settings.heldout, "heldout", HELDOUT_SEED)
        self.judge: Judge = _BodyJudge(code_verifier(settings))


@dataclass(frozen=True, slots=True)
class _BodyJudge:
    """Judges the function that an answer is the body of."""

    code: Judge

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        return self.code.judge(query, function(text), truncated=truncated)

    def close(self) -> None:
        self.code.close()


def function(body: str) -> str:
    """A response as the function that the tests call.

    >>> print(function("x=x[1:]\\nx=x+x"))
    def f(x):
     x=x[1:]
     x=x+x
     return x
    """
    return "\n".join(["def f(x):", *(f" {line}" for line in body.strip().split("\n")), " return x"])


def _problems(levels: Sequence[int], count: int, split: Split, seed: int) -> list[Query]:
    """`count` distinct problems of a split, the difficulties tried in turn: of few steps there are few programs."""
    rng = random.Random(f"code-tiny-{split}-{seed}")
    found: dict[str, Query] = {}
    for attempt in range(50 * count):
        if len(found) == count:
            break
        level = levels[attempt % len(levels)]
        steps = rng.choices(list(STEPS), k=level)
        asked = ", ".join(steps) + ":\n"
        tests = _tests(steps, rng)
        if not tests or split_of(asked) != split or asked in found:
            continue
        solution = "\n".join(_line(word, split, rng) for word in steps)
        columns = {"id": asked, "problem": asked, "tests": tests, "response": solution}
        hints = first_steps([f"{line}\n" for line in solution.splitlines()], "")
        found[asked] = Query(asked, asked, "", columns, demonstration=solution, hints=hints)
    if len(found) < count:
        raise TaskError(
            f"task.difficulty={list(levels)}: there are fewer than {count} different programs of so few steps; ask for "
            "fewer (task.size, task.heldout) or for more steps"
        )
    return list(found.values())


def _line(word: str, split: Split, rng: random.Random) -> str:
    meant, other, _ = STEPS[word]
    return other if split == "warm" and rng.randrange(2) else meant


def _tests(steps: Sequence[str], rng: random.Random) -> list[str]:
    """What the program does to a few lists; none if it leaves one of them with hardly anything, or as it was."""
    tests = []
    for _ in range(LISTS):
        given = [rng.randint(0, 9) for _ in range(rng.randint(6, 9))]
        value = given
        for word in steps:
            value = STEPS[word][2](value)
        if len(value) < SHORTEST or value == given:
            return []
        tests.append(f"assert f({given}) == {value}")
    return tests
