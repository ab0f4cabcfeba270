"""A task of the user's own file, or of a maths set by name, judged symbolically, as text, or by the user's function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from r3.errors import TaskError
from r3.samples import Query
from r3.tasks.datasets import CODE, SETS, Columns, Prompting, load_file, load_hub, load_set, select
from r3.tasks.settings import FileSettings
from r3.verify import FunctionVerifier, MathVerifier, Verdict, VerifierError
from r3.verify.boxes import boxed_answer

HUB = "hf:"


class FileTask:
    """Queries from a file, some of them held out, and the verifier that the settings name."""

    name = "file"

    def __init__(self, settings: FileSettings, length: Callable[[Query], int] | None = None) -> None:
        self._settings = settings
        queries = _rows(_load(settings.path, settings), settings)
        heldout = [] if settings.heldout_path is None else _load(settings.heldout_path, settings)[: settings.heldout]
        if settings.heldout_path is None:
            queries, heldout = _cut(queries, settings)
        self.train: Sequence[Query] = _selected(queries, settings, length)
        self.heldout: Sequence[Query] = heldout
        self._maths = MathVerifier() if settings.verifier == "math" else None
        self._function = None if settings.verifier in ("math", "boxed") else _function(settings)

    def verify(self, query: Query, completion: str) -> Verdict:
        if self._maths is not None:
            return self._maths.verify(completion, query.answer)
        if self._function is None:
            return boxed_verdict(query, completion)
        try:
            return self._function.verify(completion, query.answer, columns=query.columns)
        except (Exception, SystemExit) as error:
            raise TaskError(
                f"task.verifier={self._settings.verifier} raised {type(error).__name__} ({error}) on query "
                f"{query.id!r}; mend it, or set task.caged=true to count such answers as wrong"
            ) from error

    def close(self) -> None:
        for verifier in (self._maths, self._function):
            if verifier is not None:
                verifier.close()


def _load(name: str, settings: FileSettings) -> list[Query]:
    prompting = Prompting(chat=settings.chat, instruction=settings.instruction)
    if name in CODE:
        raise TaskError(f"{name} is a set of code, which is judged by running it: set task.name=code")
    if name in SETS:
        return load_set(name, prompting=prompting)
    columns = Columns(question=settings.question_column, answer=settings.answer_column, id=settings.id_column)
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


def _function(settings: FileSettings) -> FunctionVerifier:
    if "." not in settings.verifier:
        near = difflib.get_close_matches(settings.verifier, ("math", "boxed"), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise TaskError(
            f"task.verifier={settings.verifier}: neither math nor boxed, nor the dotted path of a function "
            f"(package.module.function){meant}"
        )
    try:
        return FunctionVerifier(settings.verifier, caged=settings.caged)
    except VerifierError as error:
        raise TaskError(f"task.verifier={error}; or write 'math' or 'boxed'") from error
    except (Exception, SystemExit) as error:  # whatever a module of the user's does when it is imported
        told = " ".join(str(error).split())[:200]
        raise TaskError(
            f"task.verifier={settings.verifier}: importing it raised {type(error).__name__} ({told}); mend the module"
        ) from error


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
