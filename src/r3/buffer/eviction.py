"""Which samples leave when there are too many.

One rule at two scopes: a query over `per_query`, then the whole buffer over `total`. **The more common outcome loses
its oldest sample; at a tie, wrong before right.** Unverified samples count with the wrong ones. So a rare success is
never pushed out by failures (nor a rare failure by successes), and what stays is recent.

An evicted row is only marked, with the step that evicted it: a rewind before that step brings it back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from r3.buffer.totals import Totals

_Victim = tuple[int, int | None, int, int]  # id, outcome, truncated, length

_QUERY_COUNTS = """
SELECT TOTAL(outcome IS 1), COUNT(*) FROM samples INDEXED BY alive_by_query WHERE query = ? AND evicted_at IS NULL
"""
_OLDEST_OF_QUERY = """
SELECT id, outcome, truncated, length FROM samples INDEXED BY alive_by_query
WHERE query = ? AND evicted_at IS NULL AND (outcome IS 1) = ? ORDER BY id LIMIT ?
"""
_OLDEST = """
SELECT id, outcome, truncated, length FROM samples INDEXED BY alive_by_age
WHERE evicted_at IS NULL AND (outcome IS 1) = ? ORDER BY id LIMIT ?
"""


def evict(
    db: sqlite3.Connection, totals: Totals, queries: Iterable[int], per_query: int | None, total: int | None
) -> Totals:
    """Bring the given queries, then the whole buffer, down to their limits. Returns the totals afterwards."""
    if per_query is not None:
        for query in queries:
            solved, alive = db.execute(_QUERY_COUNTS, (query,)).fetchone()
            right, wrong = shares(int(solved), alive - int(solved), alive - per_query)
            victims = db.execute(_OLDEST_OF_QUERY, (query, 1, right)).fetchall()
            victims += db.execute(_OLDEST_OF_QUERY, (query, 0, wrong)).fetchall()
            totals = _mark(db, totals, victims)
    if total is not None:
        right, wrong = shares(totals.solved, totals.failed + totals.unverified, totals.alive - total)
        victims = db.execute(_OLDEST, (1, right)).fetchall() + db.execute(_OLDEST, (0, wrong)).fetchall()
        totals = _mark(db, totals, victims)
    return totals


def shares(right: int, wrong: int, excess: int) -> tuple[int, int]:
    """How many right and how many wrong samples go when `excess` go one by one, each from the more common outcome.

    >>> shares(right=1, wrong=10, excess=5), shares(right=3, wrong=5, excess=5), shares(right=9, wrong=2, excess=1)
    ((0, 5), (1, 4), (1, 0))
    """
    if excess <= 0:
        return 0, 0
    lead = min(excess, abs(right - wrong))
    rest = excess - lead  # then they are level, and go in turn, wrong first
    from_right, from_wrong = rest // 2, rest - rest // 2
    return (from_right + lead, from_wrong) if right > wrong else (from_right, from_wrong + lead)


def _mark(db: sqlite3.Connection, totals: Totals, victims: list[_Victim]) -> Totals:
    db.executemany("UPDATE samples SET evicted_at = ? WHERE id = ?", [(totals.step, victim[0]) for victim in victims])
    return totals.minus([victim[1:] for victim in victims])
