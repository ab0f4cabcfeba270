"""Every response of an evaluation with its verdict, one JSON object a line, in a file that only grows.

    {"task":"aime24","id":"aime24-1-00","sample":0,"right":true,"reason":"match","answer":"721","tokens":9120,
     "truncated":false,"response":"…"}

A batch of lines is on the disk when `append` returns. A process that dies in the middle of a write leaves a cut last
line, which the next one drops. The texts stay in the file: an evaluation may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
                one = Judged(**{name: row[name] for name in Judged.__slots__})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{path}, line {number}: damaged ({error!r}); remove that line, its response is then drawn again"
                ) from error
            judged.setdefault(one.key, one)
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
