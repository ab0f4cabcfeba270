"""Responses that were saved elsewhere, by any model and any engine, to be judged by our grader.

A row names its problem by `id` or by its text (`problem`), and holds a `response` (or `completion`): one text or a
list of them. `truncated` (or `finish_reason: "length"`) says that the length limit cut it, `tokens` how long it is,
`task` which set is meant where several hold the problem. Our own responses.jsonl is such a file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.evaluate.responses import Finished
from r3.samples import Query
from r3.tasks.data_files import read_rows

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
