"""What became of answers after they were stored: how often each joined a group, how likely it was when it first did.

Rows bear the step that wrote them, so that a rewind takes them back with it. Answers are known by their query and text,
not by their id: one that is written twice, or that an earlier run wrote, is the same answer.
"""

from __future__ import annotations

import base64
import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from r3.samples import FloatArray, Joins, Sample

_ADD = (
    "INSERT INTO joined VALUES (?, ?, ?, ?, NULL) ON CONFLICT (query, fingerprint, step) "
    "DO UPDATE SET times = times + excluded.times"
)
_KEEP = "UPDATE joined SET logprobs = ? WHERE query = ? AND fingerprint = ? AND step = ?"
USED_UP = "SELECT fingerprint FROM joined WHERE query = ? GROUP BY fingerprint HAVING SUM(times) >= ?"
"""The texts of a query that joined at least so often."""


def add(db: sqlite3.Connection, step: int, samples: Iterable[Sample], keys: dict[str, int]) -> None:
    """Each of these joined a group once more; `keys` are the queries'."""
    times = Counter((keys[sample.query_id], sample.fingerprint) for sample in samples)
    db.executemany(_ADD, [(query, fingerprint, step, n) for (query, fingerprint), n in times.items()])


def keep(db: sqlite3.Connection, step: int, found: Iterable[tuple[Sample, FloatArray]], keys: dict[str, int]) -> None:
    """The log-probs that these had when they joined at this step."""
    rows = [
        (logprobs.astype("<f4").tobytes(), keys[sample.query_id], sample.fingerprint, step)
        for sample, logprobs in found
    ]
    db.executemany(_KEEP, rows)


def of_query(db: sqlite3.Connection, query: int) -> dict[bytes, Joins]:
    """By text: how often it joined, and its log-probs when it first did, where they were kept."""
    joins: dict[bytes, Joins] = {}
    rows = db.execute("SELECT fingerprint, times, logprobs FROM joined WHERE query = ? ORDER BY step", (query,))
    for fingerprint, times, blob in rows:
        before = joins.get(fingerprint, Joins(0, None))
        first = before.logprobs
        if first is None and blob is not None:
            first = np.frombuffer(blob, "<f4").astype(np.float32)
        joins[fingerprint] = Joins(before.times + times, first)
    return joins


def forget_after(db: sqlite3.Connection, step: int) -> None:
    """Take back what later steps wrote."""
    db.execute("DELETE FROM joined WHERE step > ?", (step,))


def exported(db: sqlite3.Connection) -> list[list[Any]]:
    """All rows, as JSON can hold them; none in files of earlier versions."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'joined'").fetchone() is None:
        return []
    return [
        [query, fingerprint.hex(), step, times, None if blob is None else base64.b64encode(blob).decode()]
        for query, fingerprint, step, times, blob in db.execute("SELECT * FROM joined")
    ]


def restore(db: sqlite3.Connection, rows: Iterable[Any]) -> None:
    """What `exported` gave."""
    db.executemany(
        "INSERT INTO joined VALUES (?, ?, ?, ?, ?)",
        [
            (query, bytes.fromhex(fingerprint), step, times, None if text is None else base64.b64decode(text))
            for query, fingerprint, step, times, text in rows
        ],
    )
