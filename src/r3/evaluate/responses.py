"""Every response of an evaluation with its verdict, one JSON object a line, in a file that only grows.

    {"task":"aime24","id":"aime24-1-00","sample":0,"right":true,"reason":"match","answer":"721","tokens":9120,
     "truncated":false,"response":"…"}

A batch of lines is on the disk when `append` returns. A process that dies in the middle of a write leaves a cut last
line, which the next one drops. The texts stay in the file: an evaluation may be larger than memory.

Responses that were saved elsewhere, by any model and any engine, to be judged by our grader.

A row names its problem by `id` or by its text (`problem`), and holds a `response` (or `completion`): one text or a
list of them. `truncated` (or `finish_reason: "length"`) says that the length limit cut it, `tokens` how long it is,
`task` which set is meant where several hold the problem. Our own responses.jsonl is such a file.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from r3.errors import RunError, TaskError
from r3.run.disk import AppendFile
from r3.samples import Query
from r3.tasks.data_files import read_rows

Key = tuple[str, str, int]
ANSWER_LIMIT = 200
"""Characters of an extracted answer that are kept: it is there to be counted, the response has the whole."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one response: the `sample`-th to problem `id` of a task."""

    task: str
    id: str
    sample: int
    right: bool
    reason: str
    answer: str | None
    """What was extracted, for the majority vote; None if there was nothing."""
    tokens: int | None
    """Length of the response; None where nobody counted."""
    truncated: bool
    scores: Mapping[str, float] | None = None
    """What each of several reward functions gave, weighted; None where the judge says right or wrong alone."""

    @property
    def key(self) -> Key:
        return self.task, self.id, self.sample


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that is still to be judged."""

    task: str
    query: Query
    sample: int
    text: str
    tokens: int | None
    truncated: bool


class ResponseLog:
    """The file, open for more. `judged` is what it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole, self.judged = _read(path)
        self._file = AppendFile(path)
        if path.stat().st_size > whole:
            self._file.truncate(whole)

    def append(self, batch: Sequence[tuple[Judged, str]]) -> None:
        """Add verdicts with their responses, in one write that is on the disk when it returns."""
        if batch:
            self._file.append(b"".join(_line(judged, text) for judged, text in batch))
            self.judged.update((judged.key, judged) for judged, _ in batch)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_judged(path: Path) -> list[Judged]:
    """The verdicts in a file, without the responses."""
    if not path.is_file():
        raise TaskError(f"no file {path}; give the directory of an evaluation, as r3 eval --out wrote it")
    return list(_read(path)[1].values())


def _line(judged: Judged, text: str) -> bytes:
    # ASCII escapes, so that a lone surrogate in a model's output cannot make the line impossible to write.
    said = {name: value for name, value in asdict(judged).items() if name != "scores" or value is not None}
    return json.dumps({**said, "response": text}, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> tuple[int, dict[Key, Judged]]:
    """How many bytes of the file are whole lines, and the verdicts in them."""
    judged: dict[Key, Judged] = {}
    size = 0
    if not path.exists():
        return size, judged
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                row.setdefault("scores", None)
                answer = Judged(**{name: row[name] for name in Judged.__slots__})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{path}, line {number}: damaged ({error!r}); remove that line, its response is then drawn again"
                ) from error
            judged.setdefault(answer.key, answer)
            size += len(line)
    return size, judged


def write_parquet(source: Path, target: Path, *, rows: int = 4096) -> None:
    """The same responses as a Parquet file, a bounded number in memory at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TaskError(f"{target} needs pyarrow: pip install 'r3-rl[parquet]'") from error
    text, number, flag = pyarrow.string(), pyarrow.int64(), pyarrow.bool_()
    types = {"task": text, "id": text, "sample": number, "right": flag, "reason": text, "answer": text}
    schema = pyarrow.schema(types | {"tokens": number, "truncated": flag, "scores": text, "response": text})
    with parquet.ParquetWriter(target, schema) as writer:
        for batch in _batches(read_rows(source), rows):
            writer.write_table(pyarrow.Table.from_pylist([_storable(row) for row in batch], schema))


def _storable(row: dict[str, Any]) -> dict[str, Any]:
    """Parquet's texts are UTF-8, which has no lone surrogates; scores, whose names differ, are a text of JSON."""
    row = {**row, "scores": json.dumps(row["scores"])} if row.get("scores") else row
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}


def _batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# ----------------------------------------------------- responses from elsewhere


Place = tuple[str, Query]


class SavedResponses:
    """The responses of a file to the problems of some tasks."""

    def __init__(
        self, path: Path, tasks: Mapping[str, Sequence[Query]], *, count_tokens: Callable[[str], int] | None = None
    ) -> None:
        self._path = path
        self._count = count_tokens
        self._places: defaultdict[str, list[Place]] = defaultdict(list)
        for task, queries in tasks.items():
            for query in queries:
                for name in {f"id {query.id}", f"text {_folded(query.columns.get('problem', query.prompt))}"}:
                    self._places[name].append((task, query))
        self.ignored = 0
        """Rows to problems that no task has, once all were read."""

    def __iter__(self) -> Iterator[Finished]:
        """Every response, in the file's order; the samples of a problem are numbered in that order too."""
        self.ignored = 0
        seen: Counter[tuple[str, str]] = Counter()
        example = ""
        for number, row in enumerate(read_rows(self._path), 1):
            where = f"{self._path}, row {number}"
            name = _name(row, where)
            places = [place for place in self._places.get(name, []) if row.get("task", place[0]) == place[0]]
            if not places:
                self.ignored += 1
                example = example or f"row {number}, {name[:80]!r}"
                continue
            for text, truncated, tokens in self._texts(row, where):
                for task, query in places:
                    yield Finished(task, query, seen[task, query.id], text, tokens, truncated)
                    seen[task, query.id] += 1
        if not seen:
            raise TaskError(
                f"{self._path}: none of its {self.ignored} rows is a response to a problem of the tasks given "
                f"(e.g. {example}); name the right sets with --tasks"
            )

    def _texts(self, row: Mapping[str, Any], where: str) -> Iterator[tuple[str, bool, int | None]]:
        given = row.get("response", row.get("completion"))
        texts = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TaskError(f"{where}: no text in column 'response' (or 'completion'), nor a list of texts")
        cut = row.get("truncated", row.get("finish_reason"))
        tokens = row.get("tokens")
        for place, text in enumerate(texts):
            own_cut = _of(cut, place, len(texts), where, "truncated")
            own_tokens = _of(tokens, place, len(texts), where, "tokens")
            if own_tokens is None and self._count is not None:
                own_tokens = self._count(text)
            yield text, own_cut is True or own_cut == "length", own_tokens


def _of(value: Any, place: int, count: int, where: str, column: str) -> Any:
    """One response's own value: of a list that goes with the list of responses, or one value for all."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise TaskError(f"{where}: {len(value)} values in {column!r} for {count} responses; give one for each")
    return value[place]


def _name(row: Mapping[str, Any], where: str) -> str:
    if row.get("id") is not None:
        return f"id {row['id']}"
    if row.get("problem") is not None:
        return f"text {_folded(row['problem'])}"
    raise TaskError(f"{where}: neither 'id' nor 'problem' says which problem the response is to")


def _folded(text: object) -> str:
    return " ".join(str(text).split())
