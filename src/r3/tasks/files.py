"""Queries from a JSONL, JSON or Parquet file, judged by their boxed answer or by a function of the user's.

Two columns are enough: a question and an answer. Every other column reaches the verifier by its name.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3.config import TaskSettings
from r3.samples import Message, Query
from r3.tasks.base import TaskError, Verdict


class FileTask:
    """A task of the user's own data."""

    name = "file"

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.path is not None  # the config was validated
        self._judge = _judge(settings)
        queries = _queries(Path(settings.path), settings)
        if settings.heldout_path is not None:
            self.train: Sequence[Query] = queries
            self.heldout: Sequence[Query] = _queries(Path(settings.heldout_path), settings)[: settings.heldout]
        else:
            cut = len(queries) - settings.heldout
            if cut < 1:
                raise TaskError(
                    f"{settings.path} has {len(queries)} problems and task.heldout={settings.heldout} keeps that many "
                    "apart: nothing is left to train on; lower task.heldout or give task.heldout_path"
                )
            self.train, self.heldout = queries[:cut], queries[cut:]

    def verify(self, query: Query, completion: str) -> Verdict:
        return self._judge(query, completion)


def _queries(path: Path, settings: TaskSettings) -> list[Query]:
    queries: dict[str, Query] = {}
    for number, row in enumerate(read_rows(path), 1):
        for column in (settings.question_column, settings.answer_column):
            if column not in row:
                raise TaskError(
                    f"{path}, row {number}: no column {column!r} among {sorted(row)}; name yours with "
                    "task.question_column and task.answer_column"
                )
        question = str(row[settings.question_column])
        query_id = str(row.get(settings.id_column) or hashlib.sha1(question.encode()).hexdigest()[:16])
        if query_id in queries:
            raise TaskError(
                f"{path}, row {number}: id {query_id!r} appears twice; ids must be unique, fix task.id_column"
            )
        asked = f"{question}\n\n{settings.instruction}" if settings.instruction else question
        prompt = (Message("user", asked),) if settings.chat else asked
        queries[query_id] = Query(query_id, prompt, str(row[settings.answer_column]), row)
    if not queries:
        raise TaskError(f"{path} holds no problems; task.path must name a file with at least one row")
    return list(queries.values())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .jsonl.gz, .json or .parquet file as mappings."""
    if not path.is_file():
        raise TaskError(f"no file {path}; set task.path to your data")
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise TaskError(f"{path} needs pyarrow: pip install 'r3-rl[parquet]'") from error
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    lines = json.loads(text) if path.suffix == ".json" else None
    if lines is not None:
        yield from lines
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _row(path, number, line)


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}, line {number}: not JSON ({error.msg}); every line must be one object") from error
    if not isinstance(row, dict):
        raise TaskError(f"{path}, line {number}: a {type(row).__name__}, not an object with named columns")
    return row


def _judge(settings: TaskSettings) -> Callable[[Query, str], Verdict]:
    if settings.verifier == "boxed":
        return boxed_verdict
    function = _imported(settings.verifier)

    def judge(query: Query, completion: str) -> Verdict:
        columns: Mapping[str, Any] = {**query.columns, "answer": query.answer}
        return Verdict(bool(function(completion, **columns)), settings.verifier)

    return judge


def _imported(dotted: str) -> Callable[..., Any]:
    module, _, name = dotted.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskError(
            f"task.verifier={dotted}: cannot import it ({error}); write 'boxed' or package.module.function"
        ) from error
    if not callable(function):
        raise TaskError(f"task.verifier={dotted} is not a function f(completion, **columns) → bool")
    return function  # type: ignore[no-any-return]


def boxed_verdict(query: Query, completion: str) -> Verdict:
    r"""Right if the last \boxed{} holds the reference answer, spaces and dollar signs aside.

    >>> q = Query("q", "1/2+1/3?", "5/6")
    >>> boxed_verdict(q, r"So \boxed{ 5/6 }."), boxed_verdict(q, "5/6")
    (Verdict(right=True, reason='match'), Verdict(right=False, reason='no box'))
    """
    boxed = last_boxed(completion)
    if boxed is None:
        return Verdict(False, "no box")
    if not _normalised(boxed):
        return Verdict(False, "empty box")
    right = _normalised(boxed) == _normalised(query.answer)
    return Verdict(right, "match" if right else "other answer")


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, nested braces included; None without one or if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i]
    return None


def _normalised(answer: str) -> str:
    return "".join(answer.split()).strip("$").rstrip(".")
