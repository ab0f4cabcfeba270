"""Python functions and programs, judged by running them against tests: MBPP, or a file with the same columns.

A row has `problem` and `tests`: Python sources that must run without an exception behind the answer, or objects with
the `input` and `output` of a program. `setup` runs between the answer and its tests. With `entry_point` the problem is
itself Python, a signature with its docstring, which the answer completes.

Beside it (`TinyCodeTask`) is a language of little programs over a list of numbers, for a model with one token per
character.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.arithmetic import HELDOUT_SEED, Split, split_of
from r3.tasks.data_files import read_rows
from r3.tasks.datasets import CODE, TESTS, Columns, HelpColumns, load_set, queries_of, select
from r3.tasks.files import help_columns
from r3.tasks.settings import CodeSettings, SandboxedSettings, TinyCodeSettings
from r3.tasks.task import Prompting, first_steps
from r3.verify import Judge, Verdict, VerifierError
from r3.verify.code import CodeVerifier, job_of
from r3.verify.sandbox import SandboxSettings

BY_NAME = {"mbpp": ("mbpp-train", "mbpp-valid")}
"""What a name stands for in training: the set to train on, and the one to hold out."""


class CodeTask:
    """Problems to solve in Python, and the judge that runs the answers."""

    name = "code"

    def __init__(self, settings: CodeSettings, length: Callable[[Query], int] | None = None) -> None:
        prompting = settings.prompting
        path, heldout_path = BY_NAME.get(settings.path, (settings.path, None))
        heldout_path = settings.heldout_path or heldout_path
        queries = load_code(path, prompting, help=help_columns(settings))
        if heldout_path is not None:
            heldout = load_code(heldout_path, prompting)[: settings.heldout]
        elif len(queries) > settings.heldout:
            cut = len(queries) - settings.heldout
            queries, heldout = queries[:cut], queries[cut:]
        else:
            raise TaskError(
                f"{settings.path} has {len(queries)} problems and task.heldout={settings.heldout} keeps that many "
                "apart: nothing is left to train on; lower task.heldout or give task.heldout_path"
            )
        longest = settings.max_prompt_tokens if length is not None else None
        self.train: Sequence[Query] = select(queries, max_prompt_tokens=longest, length=length)
        if not self.train:
            raise TaskError(f"no problem of {settings.path} has a prompt of at most task.max_prompt_tokens={longest}")
        self.heldout: Sequence[Query] = heldout
        self.judge: Judge = code_verifier(settings)


def code_verifier(settings: SandboxedSettings) -> CodeVerifier:
    """The judge that the settings ask for."""
    limits = SandboxSettings(
        walls=settings.sandbox, workers=settings.workers, seconds=settings.seconds, memory_mb=settings.memory_mb
    )
    return CodeVerifier(limits, graded=settings.graded)


def load_code(
    name: str, prompting: Prompting, folder: str | Path | None = None, *, help: HelpColumns | None = None
) -> list[Query]:
    """A set of code by name, or a file with the same columns. Every row is checked to be one that can be judged."""
    if name in CODE:
        queries = load_set(name, folder=folder, prompting=prompting, help=help)
    else:
        columns = Columns(answer=TESTS, help=help or HelpColumns())
        queries = queries_of(read_rows(Path(name)), name, columns=columns, prompting=prompting)
    for query in queries:
        try:
            job_of("", query.columns)
        except VerifierError as error:
            raise TaskError(f"{name}, {error}") from error
    return [replace(query, prompt=prompting.prompt(question(query.columns), query.columns)) for query in queries]


def question(columns: Mapping[str, Any]) -> str:
    """How a row is put to a model: with its first test, as is the custom for MBPP, since that names the function.

    >>> print(question({"problem": "Write a function to double.", "tests": ["assert double(2) == 4", "assert 0"]}))
    Write a function to double.
    <BLANKLINE>
    It must pass this test:
    <BLANKLINE>
    ```python
    assert double(2) == 4
    ```
    """
    problem, first = str(columns["problem"]), columns[TESTS][0]
    if columns.get("entry_point"):
        return f"Complete this function:\n\n```python\n{problem.rstrip()}\n```"
    if isinstance(first, str):
        return f"{problem.rstrip()}\n\nIt must pass this test:\n\n```python\n{first.strip()}\n```"
    return f"{problem.rstrip()}\n\nThe program reads standard input and writes to standard output."


# ---------------------------------------------- the language of little programs


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
