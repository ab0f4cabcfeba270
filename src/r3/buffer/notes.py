"""What the algorithm records besides samples. Each row names the step that wrote it, so that a rewind removes it too.

joined      how often answers of one text joined a group, and how likely they were when they first did. Answers are
            known by their query and text, not by their id: one that is written twice, or that an earlier run wrote, is
            the same answer
late_pairs  of each group, how many pairs of a right and a wrong late answer the ranking's order had right
"""

from __future__ import annotations

import base64
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from r3.samples import FloatArray, Joins, Sample

TABLES = (
    "CREATE TABLE IF NOT EXISTS joined (query INTEGER NOT NULL, fingerprint BLOB NOT NULL, step INTEGER NOT NULL, "
    "times INTEGER NOT NULL, logprobs BLOB, PRIMARY KEY (query, fingerprint, step)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS late_pairs (step INTEGER NOT NULL, number INTEGER NOT NULL, in_order REAL NOT NULL, "
    "pairs INTEGER NOT NULL, PRIMARY KEY (step, number)) WITHOUT ROWID",
)
_ADD = (
    "INSERT INTO joined VALUES (?, ?, ?, ?, NULL) ON CONFLICT (query, fingerprint, step) "
    "DO UPDATE SET times = times + excluded.times"
)
_KEEP = "UPDATE joined SET logprobs = ? WHERE query = ? AND fingerprint = ? AND step = ?"
USED_UP = "SELECT fingerprint FROM joined WHERE query = ? GROUP BY fingerprint HAVING SUM(times) >= ?"
"""The texts of a query that joined at least a given number of times."""


def add(db: sqlite3.Connection, step: int, samples: Iterable[Sample], keys: dict[str, int]) -> None:
    """Count that each of these samples joined a group once more. `keys` has each query's integer key."""
    times = Counter((keys[sample.query_id], sample.fingerprint) for sample in samples)
    db.executemany(_ADD, [(query, fingerprint, step, n) for (query, fingerprint), n in times.items()])


def keep(db: sqlite3.Connection, step: int, joined: Iterable[tuple[Sample, FloatArray]], keys: dict[str, int]) -> None:
    """Store the log-probs that these samples had when they joined at this step."""
    rows = [
        (logprobs.astype("<f4").tobytes(), keys[sample.query_id], sample.fingerprint, step)
        for sample, logprobs in joined
    ]
    db.executemany(_KEEP, rows)


def of_query(db: sqlite3.Connection, query: int) -> dict[bytes, Joins]:
    """How often each text joined, and its log-probs when it first did, where they were kept; by fingerprint."""
    joins: dict[bytes, Joins] = {}
    rows = db.execute("SELECT fingerprint, times, logprobs FROM joined WHERE query = ? ORDER BY step", (query,))
    for fingerprint, times, blob in rows:
        before = joins.get(fingerprint, Joins(0, None))
        first = before.logprobs
        if first is None and blob is not None:
            first = np.frombuffer(blob, "<f4").astype(np.float32)
        joins[fingerprint] = Joins(before.times + times, first)
    return joins


def add_late_pairs(db: sqlite3.Connection, step: int, groups: Iterable[tuple[float, int]]) -> None:
    """Store for each group of a step how many of its pairs the ranking ordered correctly, and how many there were."""
    rows = [(step, number, in_order, pairs) for number, (in_order, pairs) in enumerate(groups)]
    db.executemany("INSERT INTO late_pairs VALUES (?, ?, ?, ?)", rows)


def late_pairs(db: sqlite3.Connection, newest: int) -> list[tuple[float, int]]:
    """The pairs of each group, newest step first, of as many whole steps as it takes to reach `newest` pairs."""
    groups: list[tuple[float, int]] = []
    counted, last = 0, None
    for step, in_order, pairs in db.execute("SELECT step, in_order, pairs FROM late_pairs ORDER BY step DESC, number"):
        if counted >= newest and step != last:
            break
        groups.append((in_order, pairs))
        counted, last = counted + pairs, step
    return groups


def forget_after(db: sqlite3.Connection, step: int) -> None:
    """Remove what later steps wrote."""
    db.execute("DELETE FROM joined WHERE step > ?", (step,))
    db.execute("DELETE FROM late_pairs WHERE step > ?", (step,))


def exported(db: sqlite3.Connection) -> dict[str, list[list[Any]]]:
    """All rows, as JSON can hold them; none in files of earlier versions."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    joined = db.execute("SELECT * FROM joined") if "joined" in tables else ()
    pairs = db.execute("SELECT * FROM late_pairs") if "late_pairs" in tables else ()
    return {
        "joined": [
            [query, fingerprint.hex(), step, times, None if blob is None else base64.b64encode(blob).decode()]
            for query, fingerprint, step, times, blob in joined
        ],
        "late_pairs": [list(row) for row in pairs],
    }


def restore(db: sqlite3.Connection, tables: Mapping[str, Any]) -> None:
    """Store again what `exported` gave."""
    db.executemany(
        "INSERT INTO joined VALUES (?, ?, ?, ?, ?)",
        [
            (query, bytes.fromhex(fingerprint), step, times, None if text is None else base64.b64decode(text))
            for query, fingerprint, step, times, text in tables.get("joined", [])
        ],
    )
    db.executemany("INSERT INTO late_pairs VALUES (?, ?, ?, ?)", tables.get("late_pairs", []))
