"""Checks that a buffer is still what was written, and saves what is readable of a damaged one.

SQLite checks pages and indexes, checksums cover the samples, and a recount the totals. Salvaging copies id by id.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from r3.buffer import codec, database, notes, totals
from r3.buffer.database import SampleBufferError, explained
from r3.buffer.totals import Totals


def problems(db: sqlite3.Connection, path: str) -> list[str]:
    """One line for each problem found; an empty list for a sound file."""
    try:
        lines = [row[0] for row in db.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        return [f"pages: {error}"]
    complaints = [f"pages: {line}" for line in lines if line != "ok"] + _unreadable(db, path)
    try:
        wrong = totals.disagreement(db)
    except (sqlite3.DatabaseError, TypeError) as error:  # TypeError: a damaged row may hold text where numbers were
        wrong = str(error)
    return complaints if wrong is None else [*complaints, f"totals: {wrong}"]


def _unreadable(db: sqlite3.Connection, path: str) -> list[str]:
    complaints = []
    try:
        for (sample_id,) in db.execute("SELECT id FROM samples"):
            try:
                codec.read(db, path, sample_id)
            except (SampleBufferError, sqlite3.DatabaseError) as error:
                complaints.append(f"sample {sample_id}: {error}")
    except sqlite3.DatabaseError as error:
        complaints.append(f"samples: {error}")
    return complaints


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What `salvage` saved and what it could not."""

    samples: int
    """Samples copied, each with a matching checksum."""
    unreadable: tuple[int, ...]
    """Ids whose rows are damaged."""
    missing: int | None
    """Samples that the totals count and the copy lacks, unreadable ones included; None if the totals are lost too."""
    ledger_kept: bool
    """False: it was damaged and is rebuilt from the copied samples; attempts of samples settled before are lost."""


@dataclass(frozen=True, slots=True)
class _SmallTables:
    """Everything but the samples, read whole."""

    queries: list[tuple[int, str]]
    attempts: list[tuple[int, ...]]
    steps: list[Totals]
    settled: tuple[int, int]
    notes: dict[str, Any]


def salvage(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Salvaged:
    """Copy every readable sample of `source` to the new file `target`, ids included. `source` is only read."""
    origin, goal = os.fspath(source), os.fspath(target)
    if os.path.exists(goal):
        raise SampleBufferError(f"{goal}: exists already; salvage into a new file")
    with closing(database.connect_reader(origin)) as damaged_db:
        with explained(origin, "reading how far its ids go"):
            end = _end_of_ids(damaged_db)
        lock = database.lock_for_writing(goal)
        try:
            writer, doing = database.connect_writer(goal), explained(goal, f"salvaging {origin}")
            with closing(writer), doing, database.transaction(writer, "BEGIN IMMEDIATE") as db:
                tables = _read_small_tables(damaged_db)
                keys = {uid: key for key, uid in tables.queries} if tables else {}
                kept, unreadable = _copy_samples(damaged_db, origin, db, end, keys)
                _write_small_tables(db, tables, keys)
        finally:
            lock.release()
    expected = None
    if tables is not None:
        last = tables.steps[-1] if tables.steps else Totals()
        expected = last.alive + last.evicted - tables.settled[1]
    missing = None if expected is None else expected - kept
    return Salvaged(kept, tuple(unreadable), missing, ledger_kept=tables is not None)


def _end_of_ids(db: sqlite3.Connection) -> int:
    try:
        end = totals.load(db).next_id
        if end > 1:
            return end
    except (sqlite3.DatabaseError, TypeError):  # TypeError: a damaged row may hold text where numbers were
        pass  # the rows say it too
    return int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM samples").fetchone()[0])


def _read_small_tables(db: sqlite3.Connection) -> _SmallTables | None:
    """The small tables, if each can be read and they agree with each other."""
    try:
        tables = _SmallTables(
            queries=db.execute("SELECT key, uid FROM queries ORDER BY key").fetchall(),
            attempts=db.execute("SELECT query, reflection, step, tried, solved FROM attempts").fetchall(),
            steps=[Totals(*row) for row in db.execute("SELECT * FROM steps ORDER BY step")],
            settled=db.execute("SELECT step, rows FROM settled").fetchone(),
            notes=notes.exported(db),
        )
        last = tables.steps[-1] if tables.steps else Totals()
        tried, solved = sum(row[3] for row in tables.attempts), sum(row[4] for row in tables.attempts)
        agree = [key for key, _ in tables.queries] == list(range(1, last.queries + 1))
        return tables if agree and (tried, solved) == (last.tried, last.tried_solved) else None
    except (sqlite3.DatabaseError, TypeError):
        return None


def _copy_samples(
    source: sqlite3.Connection, origin: str, db: sqlite3.Connection, end: int, keys: dict[str, int]
) -> tuple[int, list[int]]:
    """Id by id, because a cursor that meets a damaged page goes no further."""
    kept, unreadable = 0, []
    for sample_id in range(1, end):
        try:
            row = codec.read(source, origin, sample_id)
        except (SampleBufferError, sqlite3.DatabaseError):
            unreadable.append(sample_id)
            continue
        if row is not None:
            key = keys.setdefault(row.sample.query_id, len(keys) + 1)
            codec.insert(db, row.sample, sample_id, key, row.evicted_at)
            kept += 1
    return kept, unreadable


def _write_small_tables(db: sqlite3.Connection, tables: _SmallTables | None, keys: dict[str, int]) -> None:
    db.executemany("INSERT INTO queries VALUES (?, ?)", [(key, uid) for uid, key in keys.items()])
    if tables is None:
        db.execute(
            "INSERT INTO attempts SELECT query, reflection, step, COUNT(outcome), SUM(outcome) FROM samples "
            "WHERE outcome IS NOT NULL GROUP BY query, reflection, step"
        )
    else:
        db.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?)", tables.attempts)
        db.execute("UPDATE settled SET step = ?, rows = ?", tables.settled)
        notes.restore(db, tables.notes)
    for row in totals.rebuild(db, {row.step: row for row in tables.steps} if tables else {}):
        totals.save(db, row)
