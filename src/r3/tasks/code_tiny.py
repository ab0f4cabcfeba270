r"""A language of little programs over a list of numbers, for a model with a token per character.

    question   sort, add 3, drop 2:
    response   x=sorted(x)
               x=[v+3 for v in x]
               x=x[2:]

The response is the body of a function of the list x, whose value is x at the end. It is run against three lists in the
sandbox that judges all code; any program that does the same is right. Difficulty is the number of steps. Problems are
split by a hash of their text into `warm`, `train` and `heldout`.
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
from r3.verify.base import Judge, Verdict

Program = Callable[[list[int], int], list[int]]
STEPS: dict[str, tuple[str, Program]] = {
    "add {n}": ("x=[v+{n} for v in x]", lambda x, n: [v + n for v in x]),
    "times {n}": ("x=[v*{n} for v in x]", lambda x, n: [v * n for v in x]),
    "over {n}": ("x=[v for v in x if v>{n}]", lambda x, n: [v for v in x if v > n]),
    "drop {n}": ("x=x[{n}:]", lambda x, n: x[n:]),
    "take {n}": ("x=x[:{n}]", lambda x, n: x[:n]),
    "every {n}": ("x=x[::{n}]", lambda x, n: x[::n]),
    "sort": ("x=sorted(x)", lambda x, _: sorted(x)),
    "reverse": ("x=x[::-1]", lambda x, _: x[::-1]),
    "twice": ("x=x+x", lambda x, _: x + x),
}
"""Each step in words: the line that a warm start writes for it, and what it does."""
SMALLEST, LARGEST = 2, 6
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
    """`count` distinct problems of a split, the difficulties in turn."""
    rng = random.Random(f"code-tiny-{split}-{seed}")
    found: dict[str, Query] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        level = levels[len(found) % len(levels)]
        steps = [(rng.choice(list(STEPS)), rng.randint(SMALLEST, LARGEST)) for _ in range(level)]
        asked = ", ".join(words.format(n=number) for words, number in steps) + ":\n"
        tests = _tests(steps, rng)
        if not tests or split_of(asked) != split or asked in found:
            continue
        solution = "\n".join(STEPS[words][0].format(n=number) for words, number in steps)
        found[asked] = Query(asked, asked, "", {"id": asked, "problem": asked, "tests": tests, "response": solution})
    if len(found) < count:
        raise TaskError(
            f"task.difficulty={list(levels)}: there are fewer than {count} different programs of so few steps; ask for "
            "fewer (task.size, task.heldout) or for more steps"
        )
    return list(found.values())


def _tests(steps: Sequence[tuple[str, int]], rng: random.Random) -> list[str]:
    """What the program does to a few lists; none if it leaves one of them with hardly anything, or as it was."""
    tests = []
    for _ in range(LISTS):
        given = [rng.randint(0, 9) for _ in range(rng.randint(6, 9))]
        value = given
        for words, number in steps:
            value = STEPS[words][1](value, number)
        if len(value) < SHORTEST or value == given:
            return []
        tests.append(f"assert f({given}) == {value}")
    return tests
