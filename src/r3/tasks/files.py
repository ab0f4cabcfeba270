"""A task of the user's own file, or of a maths set by name, judged symbolically, as text, or by the user's function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.datasets import CODE, SETS, Columns, HelpColumns, load_file, load_hub, load_set, select
from r3.tasks.settings import FileSettings, RowSettings
from r3.verify import FunctionJudge, Judge, MathVerifier, Verdict, VerifierError
from r3.verify.judge import PlainJudge
from r3.verify.maths import boxed_answer

HUB = "hf:"


class FileTask:
    """Queries from a file, some of them held out, and the verifier that the settings name."""

    name = "file"

    def __init__(self, settings: FileSettings, length: Callable[[Query], int] | None = None) -> None:
        queries = _rows(_load(settings.path, settings, help_columns(settings)), settings)
        heldout = [] if settings.heldout_path is None else _load(settings.heldout_path, settings)[: settings.heldout]
        if settings.heldout_path is None:
            queries, heldout = _cut(queries, settings)
        self.train: Sequence[Query] = _selected(queries, settings, length)
        self.heldout: Sequence[Query] = heldout
        self.judge: Judge = _judge(settings)


def _judge(settings: FileSettings) -> Judge:
    """Who says what is right, unless `task.rewards` do."""
    if settings.verifier == "math":
        return MathVerifier()
    if settings.verifier == "boxed":
        return PlainJudge(boxed_verdict)
    if "." not in settings.verifier:
        near = difflib.get_close_matches(settings.verifier, ("math", "boxed"), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise TaskError(
            f"task.verifier={settings.verifier}: neither math nor boxed, nor the dotted path of a function "
            f"(package.module.function){meant}"
        )
    try:
        return FunctionJudge(settings.verifier, caged=settings.caged, setting="task.caged=true")
    except VerifierError as error:
        raise TaskError(f"task.verifier={error}; or write 'math' or 'boxed'") from error


def help_columns(settings: RowSettings) -> HelpColumns:
    """The columns that methods show or train on, as the settings name them."""
    return HelpColumns(settings.demonstration_column, settings.hint_column, settings.feedback_column)


def _load(name: str, settings: FileSettings, help: HelpColumns | None = None) -> list[Query]:
    """The rows of a set or file; held-out ones need no `help`."""
    prompting = settings.prompting
    if name in CODE:
        raise TaskError(f"{name} is a set of code, which is judged by running it: set task.name=code")
    if name in SETS:
        return load_set(name, prompting=prompting, help=help)
    columns = Columns(
        question=settings.question_column,
        answer=settings.answer_column,
        id=settings.id_column,
        needs_answer=settings.needs_answers,
        help=help or HelpColumns(),
    )
    if name.startswith(HUB):
        hub, _, split = name.removeprefix(HUB).partition("@")
        return load_hub(hub, split=split or "train", columns=columns, prompting=prompting)
    return load_file(Path(name), columns=columns, prompting=prompting)


def _rows(queries: list[Query], settings: FileSettings) -> list[Query]:
    """The rows that are asked for."""
    if settings.rows is None:
        return queries
    first, end = settings.rows
    if not 0 <= first < end <= len(queries):
        raise TaskError(
            f"task.rows={list(settings.rows)}: {settings.path} has rows 0 to {len(queries)}; give a first row and an "
            "end behind it, within these"
        )
    return queries[first:end]


def _cut(queries: list[Query], settings: FileSettings) -> tuple[list[Query], list[Query]]:
    """The rows to train on, and the last ones, kept apart."""
    cut = len(queries) - settings.heldout
    if cut < 1:
        raise TaskError(
            f"{settings.path} has {len(queries)} problems and task.heldout={settings.heldout} keeps that many apart: "
            "nothing is left to train on; lower task.heldout or give task.heldout_path"
        )
    return queries[:cut], queries[cut:]


def _selected(queries: list[Query], settings: FileSettings, length: Callable[[Query], int] | None) -> list[Query]:
    low, high = settings.min_difficulty, settings.max_difficulty
    bounded = low is not None or high is not None
    kept = select(
        queries,
        difficulty=(float("-inf") if low is None else low, float("inf") if high is None else high) if bounded else None,
        max_prompt_tokens=settings.max_prompt_tokens if length is not None else None,
        length=length,
    )
    if not kept:
        raise TaskError(
            f"none of the {len(queries)} problems of {settings.path} passes task.min_difficulty, task.max_difficulty "
            "and task.max_prompt_tokens; widen them"
        )
    return kept


def boxed_verdict(query: Query, completion: str) -> Verdict:
    r"""Right if the last \boxed{} holds the reference answer, spaces and dollar signs aside.

    >>> q = Query("q", "1/2+1/3?", "5/6")
    >>> boxed_verdict(q, r"So \boxed{ 5/6 }.").right, boxed_verdict(q, "5/6").reason
    (True, 'no box')
    """
    boxed = boxed_answer(completion)
    if boxed.reason:
        return Verdict(False, boxed.reason)
    right = _normalised(boxed.answer) == _normalised(query.answer)
    return Verdict(right, "match" if right else "different")


def _normalised(answer: str) -> str:
    return "".join(answer.split()).strip("$").rstrip(".")
