"""Running totals at the end of each step: cheap statistics, and the exact state to which a rewind returns.

Beside them is a running digest, over the digest before and the checksum of every sample that the step stored. Two
buffers with the same digest were filled with the same samples in the same order. It hashes 16 bytes per sample.

`evict` says which samples leave when there are too many.

One rule at two scopes: a query over `per_query`, then the whole buffer over `total`. **The more common outcome loses
its oldest sample; at a tie, wrong before right.** Unverified samples count with the wrong ones. So a rare success is
never pushed out by failures (nor a rare failure by successes), and what stays is recent.

An evicted row is only marked, with the step that evicted it: a rewind before that step brings it back.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from r3.samples import CONTEXT_KINDS, Sample

NOTHING = -1  # the step and the policy version of an empty buffer


@dataclass(frozen=True, slots=True)
class Totals:
    """One row of `steps`. All but `next_id`, `queries`, `evicted` and the ledger's `tried*` count living samples."""

    step: int = NOTHING
    next_id: int = 1
    queries: int = 0
    solved: int = 0
    failed: int = 0
    unverified: int = 0
    truncated: int = 0
    tokens: int = 0
    evicted: int = 0
    policy_version: int = NOTHING
    tried: int = 0
    tried_solved: int = 0

    @property
    def alive(self) -> int:
        return self.solved + self.failed + self.unverified

    def plus(self, step: int, samples: Sequence[Sample], queries: int) -> Totals:
        """The totals with the samples added at `step`, after which the buffer knows `queries` queries."""
        facts = [(sample.outcome, sample.truncated, len(sample)) for sample in samples]
        verified = [bool(outcome) for outcome, _, _ in facts if outcome is not None]
        return replace(
            self._shifted(facts, +1),
            step=step,
            queries=queries,
            next_id=self.next_id + len(samples),
            policy_version=max(self.policy_version, *(int(sample.policy_version) for sample in samples)),
            tried=self.tried + len(verified),
            tried_solved=self.tried_solved + sum(verified),
        )

    def minus(self, evicted: Sequence[tuple[int | None, int, int]]) -> Totals:
        """The totals without evicted samples (outcome, truncated, length)."""
        return replace(self._shifted(evicted, -1), evicted=self.evicted + len(evicted))

    def _shifted(self, facts: Sequence[tuple[int | None, int, int]], sign: int) -> Totals:
        outcomes = Counter(None if outcome is None else bool(outcome) for outcome, _, _ in facts)
        return replace(
            self,
            solved=self.solved + sign * outcomes[True],
            failed=self.failed + sign * outcomes[False],
            unverified=self.unverified + sign * outcomes[None],
            truncated=self.truncated + sign * sum(truncated for _, truncated, _ in facts),
            tokens=self.tokens + sign * sum(length for _, _, length in facts),
        )


def load(db: sqlite3.Connection, until: int | None = None) -> Totals:
    """The totals now, or as they were at the end of step `until`."""
    where = "" if until is None else "WHERE step <= ?"
    row = db.execute(
        f"SELECT * FROM steps {where} ORDER BY step DESC LIMIT 1", () if until is None else (until,)
    ).fetchone()
    return Totals() if row is None else Totals(*row)


def save(db: sqlite3.Connection, totals: Totals) -> None:
    marks = ", ".join("?" * len(astuple(totals)))
    db.execute(f"INSERT OR REPLACE INTO steps VALUES ({marks})", astuple(totals))


def load_digest(db: sqlite3.Connection, until: int | None = None) -> bytes | None:
    """The running digest now, or at the end of step `until`; None in files of earlier versions and salvaged ones."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digests'").fetchone() is None:
        return None
    where = "" if until is None else "WHERE step <= ?"
    row = db.execute(
        f"SELECT digest FROM digests {where} ORDER BY step DESC LIMIT 1", () if until is None else (until,)
    ).fetchone()
    return None if row is None else bytes(row[0])


def digests(db: sqlite3.Connection) -> list[tuple[int, str]]:
    """The digest of every step, as text."""
    if load_digest(db) is None:
        return []
    return [(step, digest.hex()) for step, digest in db.execute("SELECT step, digest FROM digests ORDER BY step")]


def extend_digest(db: sqlite3.Connection, step: int, checksums: Sequence[tuple[int, int]]) -> None:
    """Extend the digest by the (id, checksum) pairs of the samples stored at `step`."""
    digest = hashlib.blake2b(load_digest(db) or b"", digest_size=16)
    digest.update(struct.pack("<Q", step))
    for sample_id, checksum in checksums:
        digest.update(struct.pack("<QQ", sample_id, checksum))
    db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (step, digest.digest()))


def enter_attempts(db: sqlite3.Connection, step: int, samples: Sequence[Sample], keys: dict[str, int]) -> None:
    """Add verified attempts to the ledger. `keys` has each query's integer key."""
    ledger: dict[tuple[int, int], list[bool]] = {}
    for sample in samples:
        if sample.outcome is not None:
            ledger.setdefault((keys[sample.query_id], CONTEXT_KINDS.index(sample.context.kind)), []).append(
                sample.outcome
            )
    db.executemany(
        "INSERT INTO attempts VALUES (?, ?, ?, ?, ?) ON CONFLICT (query, reflection, step) "
        "DO UPDATE SET tried = tried + excluded.tried, solved = solved + excluded.solved",
        [(query, kind, step, len(outcomes), int(sum(outcomes))) for (query, kind), outcomes in ledger.items()],
    )


def rebuild(db: sqlite3.Connection, kept: dict[int, Totals]) -> list[Totals]:
    """The totals of every step, counted from the rows; `kept` has what rows do not tell (ids, queries).

    Living at the end of a step is what was added until then, less what was evicted until then.
    """
    facts = "TOTAL(outcome IS 1), TOTAL(outcome IS 0), TOTAL(outcome IS NULL), TOTAL(truncated), TOTAL(length)"
    added = {
        row[0]: row[1:]
        for row in db.execute(
            f"SELECT step, {facts}, MAX(id), MAX(query), MAX(policy_version) FROM samples GROUP BY step"
        )
    }
    gone = {
        row[0]: row[1:]
        for row in db.execute(f"SELECT evicted_at, {facts}, COUNT(*) FROM samples WHERE evicted_at >= 0 GROUP BY 1")
    }
    ledger = {row[0]: row[1:] for row in db.execute("SELECT step, SUM(tried), SUM(solved) FROM attempts GROUP BY step")}
    (evicted,) = db.execute("SELECT rows FROM settled").fetchone()
    now, rebuilt = replace(Totals(), evicted=evicted), []
    for step in sorted({*added, *gone, *ledger, *kept}):
        *plus, last_id, query, version = added.get(step, (0, 0, 0, 0, 0, 0, 0, NOTHING))
        *minus, leaving = gone.get(step, (0,) * 6)
        solved, failed, unverified, truncated, tokens = (int(a - b) for a, b in zip(plus, minus, strict=True))
        tried, tried_solved = ledger.get(step, (0, 0))
        known = kept.get(step, now)
        now = Totals(
            step=step,
            next_id=max(now.next_id, known.next_id, last_id + 1),
            queries=max(now.queries, known.queries, query),
            solved=now.solved + solved,
            failed=now.failed + failed,
            unverified=now.unverified + unverified,
            truncated=now.truncated + truncated,
            tokens=now.tokens + tokens,
            evicted=now.evicted + leaving,
            policy_version=max(now.policy_version, known.policy_version, version),
            tried=now.tried + tried,
            tried_solved=now.tried_solved + tried_solved,
        )
        rebuilt.append(now)
    return rebuilt


def disagreement(db: sqlite3.Connection) -> str | None:
    """The first step, of those a rewind may reach, whose totals do not match the rows; None if all match."""
    said = [Totals(*row) for row in db.execute("SELECT * FROM steps ORDER BY step")]
    (settled,) = db.execute("SELECT step FROM settled").fetchone()
    first = max((row.step for row in said if row.step <= settled), default=NOTHING)  # earlier rows were settled away
    counted = {row.step: row for row in rebuild(db, {row.step: row for row in said})}
    for row in said:
        if row.step >= first and counted.pop(row.step) != row:
            return f"the totals of step {row.step} do not match the samples and attempts stored"
    if max(counted, default=NOTHING) > first:
        return f"step {max(counted)} has samples or attempts but no totals"
    (queries,) = db.execute("SELECT COUNT(*) FROM queries").fetchone()
    known = said[-1].queries if said else 0
    return None if queries == known else f"{queries} queries are stored, the totals say {known}"


# -------------------------------------------------------------------- eviction


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
