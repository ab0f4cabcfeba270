"""The buffer's page, and a query's ledger, through the buffer's read side."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from r3.buffer import SampleBuffer, SampleBufferError
from r3.view.runs import ViewedRun

_REMEMBERED = 10.0
"""Seconds for which an overview is reused: making one reads every row of a large buffer."""
_MOST_POINTS = 400
_HARDEST = 25


class BufferPages:
    """What a run's buffer holds. Opened for each question: an open reader keeps its log from shrinking."""

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._turn = threading.Lock()
        self._known: tuple[float, dict[str, Any]] | None = None

    def page(self) -> dict[str, Any]:
        """Size, age, balance, eviction and the hardest queries; `problem` says why it cannot be read."""
        with self._turn:
            if self._known is not None and time.monotonic() - self._known[0] < _REMEMBERED:
                return self._known[1]
            page = self._read()
            if "problem" not in page:
                self._known = (time.monotonic(), page)
            return page

    def _read(self) -> dict[str, Any]:
        path = self._run.files.buffer_path
        if not path.exists():
            return {"problem": "the run has no buffer.sqlite (yet)"}
        try:
            with SampleBuffer.open_reader(path) as buffer:
                stats, overview = buffer.stats(), buffer.overview(_HARDEST)
        except SampleBufferError as error:
            return {"problem": str(error)}
        return {
            "stats": asdict(stats),
            "limits": {
                "per_query": self._run.setting("buffer.per_query"),
                "total": self._run.setting("buffer.total"),
                "max_age": self._run.setting("method.replay.max_age"),
            },
            "over_time": _columns(_thinned(overview.over_time), ("step", "right", "wrong", "unverified", "evicted")),
            "by_age": _columns(_binned(overview.by_age), ("step", "right", "wrong")),
            "hardest": [
                {**rate._asdict(), "query": rate.query_id, "question": self._run.queries.question(rate.query_id)}
                for rate in overview.hardest
            ],
            "never_solved": overview.never_solved,
        }

    def ledger(self, query: str) -> list[dict[str, Any]]:
        """Every attempt at a query by step; empty where there is no readable buffer."""
        with suppress(SampleBufferError), SampleBuffer.open_reader(self._run.files.buffer_path) as buffer:
            return [entry._asdict() for entry in buffer.ledger(query)]
        return []


def _thinned(rows: list[Any]) -> list[Any]:
    """At most `_MOST_POINTS` rows, evenly chosen, always with the last."""
    if len(rows) <= _MOST_POINTS:
        return rows
    every = -(-len(rows) // _MOST_POINTS)
    return rows[len(rows) - 1 :: -every][::-1]


def _binned(rows: list[Any], most: int = 60) -> list[tuple[int, int, int]]:
    """Counts by the step in which samples were drawn, in bins of equal width."""
    if not rows:
        return []
    first, last = rows[0].step, rows[-1].step
    width = max(1, -(-(last - first + 1) // most))
    bins: dict[int, list[int]] = {at: [0, 0] for at in range(first, last + 1, width)}
    for row in rows:
        at = first + (row.step - first) // width * width
        bins[at][0] += row.right
        bins[at][1] += row.wrong
    return [(at, right, wrong) for at, (right, wrong) in bins.items()]


def _columns(rows: list[Any], names: tuple[str, ...]) -> dict[str, list[int]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}
