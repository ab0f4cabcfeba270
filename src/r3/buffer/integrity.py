"""Is the file still what was written? SQLite checks pages and indexes, checksums the samples, a recount the totals."""

from __future__ import annotations

import sqlite3

from r3.buffer import rows, totals
from r3.buffer.errors import SampleBufferError


def problems(db: sqlite3.Connection, path: str) -> list[str]:
    """One line for each problem found; an empty list for a sound file."""
    try:
        found = [row[0] for row in db.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        return [f"pages: {error}"]
    found = [f"pages: {line}" for line in found if line != "ok"]
    found += _unreadable(db, path)
    try:
        wrong = totals.disagreement(db)
    except (sqlite3.DatabaseError, TypeError) as error:  # TypeError: a damaged row may hold text where numbers were
        wrong = str(error)
    return found if wrong is None else [*found, f"totals: {wrong}"]


def _unreadable(db: sqlite3.Connection, path: str) -> list[str]:
    found = []
    try:
        for (sample_id,) in db.execute("SELECT id FROM samples"):
            try:
                rows.read(db, path, sample_id)
            except (SampleBufferError, sqlite3.DatabaseError) as error:
                found.append(f"sample {sample_id}: {error}")
    except sqlite3.DatabaseError as error:
        found.append(f"samples: {error}")
    return found
