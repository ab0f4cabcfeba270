"""Python functions and programs, judged by running them against tests: MBPP, or a file with the same columns.

A row has `problem` and `tests`: Python sources that must run without an exception behind the answer, or objects with
the `input` and `output` of a program. `setup` runs between the answer and its tests. With `entry_point` the problem is
itself Python, a signature with its docstring, which the answer completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.data_files import read_rows
from r3.tasks.datasets import CODE, TESTS, Columns, HelpColumns, load_set, queries_of, select
from r3.tasks.files import help_columns
from r3.tasks.prompting import Prompting
from r3.tasks.settings import CodeSettings, SandboxedSettings
from r3.verify import Judge, VerifierError
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
