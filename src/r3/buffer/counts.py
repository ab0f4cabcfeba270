"""What the buffer answers besides samples: rates, counts, and the overview that `r3 view` and `r3 buffer` show."""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import dataclass
from typing import NamedTuple

from r3.buffer import totals
from r3.samples import CONTEXT_KINDS, ContextKind


class Attempts(NamedTuple):
    """How often a query was tried and solved, counting verified answers only, evicted ones included."""

    tried: int
    solved: int


class Reflected(NamedTuple):
    """Attempts under a reflection prompt, and the plain ones at the same queries in the same steps, to compare with."""

    after: Attempts
    plain: Attempts


class Rewound(NamedTuple):
    """What `forget_after` did: samples removed, and evicted ones brought back."""

    removed: int
    restored: int


class Contents(NamedTuple):
    """Totals of everything stored up to the end of a step. Two buffers with equal totals hold the same samples."""

    step: int
    """The newest step with samples; -1 in an empty buffer."""
    next_id: int
    samples: int
    evicted: int
    tokens: int
    queries: int
    tried: int
    solved: int
    digest: str | None
    """A hash over the checksums of all samples in the order stored; None in a file of an earlier version."""


class LedgerEntry(NamedTuple):
    """The attempts at one query under one kind of prompt in one step."""

    step: int
    context: ContextKind
    tried: int
    solved: int


class QueryRate(NamedTuple):
    """How a query has fared under its plain prompt."""

    query_id: str
    tried: int
    solved: int
    last_step: int


class AtStep(NamedTuple):
    """Living samples at the end of a step, and how many had been evicted by then."""

    step: int
    right: int
    wrong: int
    unverified: int
    evicted: int


class OfStep(NamedTuple):
    """Living samples that were drawn in a step: how old the buffer's content is."""

    step: int
    right: int
    wrong: int


class Overview(NamedTuple):
    over_time: list[AtStep]
    by_age: list[OfStep]
    hardest: list[QueryRate]
    never_solved: int
    """Queries tried under their plain prompt and never solved there."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Living samples unless said otherwise."""

    samples: int
    right: int
    wrong: int
    unverified: int
    truncated: int
    tokens: int
    evicted: int
    """Evicted rows kept for a rewind: `settle` removes them."""
    queries: int
    """Queries ever seen."""
    oldest_step: int | None
    newest_step: int | None
    newest_policy_version: int | None
    bytes_on_disk: int
    """The file and its log; 0 in memory."""


_LEDGER = """
SELECT step, reflection, tried, solved FROM attempts
WHERE query = (SELECT key FROM queries WHERE uid = ?) ORDER BY step, reflection
"""
_REFLECTED = """
SELECT SUM(r.tried), SUM(r.solved), TOTAL(p.tried), TOTAL(p.solved) FROM attempts r
LEFT JOIN attempts p ON p.query = r.query AND p.step = r.step AND p.reflection = 0
WHERE r.reflection = 1 GROUP BY r.step ORDER BY r.step DESC
"""
_OLDEST = """
SELECT step FROM samples INDEXED BY alive_by_age WHERE evicted_at IS NULL AND (outcome IS 1) = ? ORDER BY id LIMIT 1
"""
_OVER_TIME = "SELECT step, solved, failed, unverified, evicted FROM steps ORDER BY step"
_BY_AGE = """
SELECT step, SUM(outcome IS 1), SUM(outcome IS NOT 1) FROM samples WHERE evicted_at IS NULL GROUP BY step ORDER BY step
"""
_RATES = """
SELECT query, SUM(tried) AS tried, SUM(solved) AS solved, MAX(step) AS last FROM attempts WHERE NOT reflection
GROUP BY query
"""
_HARDEST = f"""
SELECT uid, tried, solved, last FROM ({_RATES}) JOIN queries ON key = query
ORDER BY 1.0 * solved / tried, tried DESC, query LIMIT ?
"""


def number_of(context: ContextKind) -> int:
    """A context as the ledger has it."""
    if context not in CONTEXT_KINDS:
        raise ValueError(f"context must be one of {', '.join(CONTEXT_KINDS)}, not {context!r}")
    return CONTEXT_KINDS.index(context)


def attempts(
    db: sqlite3.Connection, query: int, reflection: int | None, since_step: int, newest: int | None
) -> Attempts | None:
    """The attempts at a query since a step; with `newest`, only those of the last steps that hold that many."""
    kind = "" if reflection is None else f"AND reflection = {reflection}"
    newer = "SUM(SUM(tried)) OVER (ORDER BY step DESC) - SUM(tried)"
    select = (
        "SELECT SUM(tried), SUM(solved) FROM ("
        f"SELECT SUM(tried) AS tried, SUM(solved) AS solved, {newer} AS newer FROM attempts "
        f"WHERE query = ? {kind} AND step >= ? GROUP BY step) WHERE newer < ?"
    )
    tried, solved = db.execute(select, (query, since_step, sys.maxsize if newest is None else newest)).fetchone()
    return Attempts(tried, solved) if tried else None


def reflected(db: sqlite3.Connection, newest: int) -> Reflected:
    """The last `newest` reflection answers (whole steps), and the plain ones to the same queries in those steps."""
    after, plain = Attempts(0, 0), Attempts(0, 0)
    for tried, solved, plain_tried, plain_solved in db.execute(_REFLECTED):
        after = Attempts(after.tried + tried, after.solved + solved)
        plain = Attempts(plain.tried + int(plain_tried), plain.solved + int(plain_solved))
        if after.tried >= newest:
            break
    return Reflected(after, plain)


def ledger(db: sqlite3.Connection, query_id: str) -> list[LedgerEntry]:
    """Every verified attempt at a query, in order of steps."""
    rows = db.execute(_LEDGER, (query_id,))
    return [LedgerEntry(step, CONTEXT_KINDS[kind], tried, solved) for step, kind, tried, solved in rows]


def contents(db: sqlite3.Connection, until: int | None) -> Contents:
    """What was stored up to the end of step `until`."""
    now, digest = totals.load(db, until), totals.load_digest(db, until)
    return Contents(
        step=now.step,
        next_id=now.next_id,
        samples=now.alive,
        evicted=now.evicted,
        tokens=now.tokens,
        queries=now.queries,
        tried=now.tried,
        solved=now.tried_solved,
        digest=None if digest is None else digest.hex(),
    )


def missing_rows(db: sqlite3.Connection, until: int) -> int:
    """The totals of step `until` less the rows: evicted ones are still there unless they were settled away."""
    then = totals.load(db, until)
    (settled,) = db.execute("SELECT rows FROM settled").fetchone()
    (rows,) = db.execute("SELECT COUNT(*) FROM samples WHERE id < ?", (then.next_id,)).fetchone()
    return then.alive + then.evicted - int(settled) - int(rows)


def overview(db: sqlite3.Connection, hardest: int) -> Overview:
    """The whole buffer, and its `hardest` least solved queries (the most tried first)."""
    (never,) = db.execute(f"SELECT COUNT(*) FROM ({_RATES}) WHERE solved = 0").fetchone()
    return Overview(
        over_time=[AtStep(*row) for row in db.execute(_OVER_TIME)],
        by_age=[OfStep(*row) for row in db.execute(_BY_AGE)],
        hardest=[QueryRate(*row) for row in db.execute(_HARDEST, (hardest,))],
        never_solved=never,
    )


def stats(db: sqlite3.Connection, bytes_on_disk: int) -> Stats:
    """Counts of what is stored, from the running totals."""
    now = totals.load(db)
    (settled,) = db.execute("SELECT rows FROM settled").fetchone()
    oldest = [db.execute(_OLDEST, (right,)).fetchone() for right in (0, 1)]
    return Stats(
        samples=now.alive,
        right=now.solved,
        wrong=now.failed,
        unverified=now.unverified,
        truncated=now.truncated,
        tokens=now.tokens,
        evicted=now.evicted - settled,
        queries=now.queries,
        oldest_step=min((row[0] for row in oldest if row), default=None),
        newest_step=None if now.step == totals.NOTHING else now.step,
        newest_policy_version=None if now.policy_version == totals.NOTHING else now.policy_version,
        bytes_on_disk=bytes_on_disk,
    )
