"""Answers for people who look at a buffer: a query's ledger, sizes over time, ages, and the hardest queries."""

from __future__ import annotations

import sqlite3

from r3.buffer.answers import AtStep, LedgerEntry, OfStep, Overview, QueryRate

_LEDGER = """
SELECT step, reflection, tried, solved FROM attempts
WHERE query = (SELECT key FROM queries WHERE uid = ?) ORDER BY step, reflection
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


def ledger(db: sqlite3.Connection, query_id: str) -> list[LedgerEntry]:
    """Of one query, in order of steps."""
    rows = db.execute(_LEDGER, (query_id,))
    return [
        LedgerEntry(step, "reflection" if reflection else "plain", tried, solved)
        for step, reflection, tried, solved in rows
    ]


def overview(db: sqlite3.Connection, hardest: int) -> Overview:
    """The whole buffer, and its `hardest` least solved queries (the most tried first)."""
    (never,) = db.execute(f"SELECT COUNT(*) FROM ({_RATES}) WHERE solved = 0").fetchone()
    return Overview(
        over_time=[AtStep(*row) for row in db.execute(_OVER_TIME)],
        by_age=[OfStep(*row) for row in db.execute(_BY_AGE)],
        hardest=[QueryRate(*row) for row in db.execute(_HARDEST, (hardest,))],
        never_solved=never,
    )
