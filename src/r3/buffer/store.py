"""`SampleBuffer`: every past sample by query, in one SQLite file (see `database` for its tables)."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Self

from r3.buffer import codec, counts, damage, database, exchange, notes, totals
from r3.buffer.counts import Attempts, Contents, LedgerEntry, Overview, Reflected, Rewound, Stats
from r3.buffer.database import SampleBufferError, damaged, explained
from r3.buffer.totals import evict
from r3.locks import FileLock
from r3.samples import ContextKind, FloatArray, Joins, Sample


class SampleBuffer:
    """Every past sample by query id: one writer, any number of readers.

    `SampleBuffer(path)` writes (and may be asked everything); `SampleBuffer.open_reader(path)` only reads, from any
    process, while the writer writes, and each call sees a whole number of `add`s. `":memory:"` keeps all in memory. The
    path must be on a local disk: SQLite's log and its locks do not work over network file systems.

    `per_query` and `total` limit the living samples (None: no limit); `r3.buffer.totals` says which ones leave. The
    text of a response is not stored: its tokens are, and decode to it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        per_query: int | None = 64,
        total: int | None = 1_000_000,
        read_only: bool = False,
    ) -> None:
        for name, limit in (("per_query", per_query), ("total", total)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, or None for no limit, not {limit}")
        self.path = os.fspath(path)
        self.per_query = per_query
        self.total = total
        self.read_only = read_only
        self._writer_lock: FileLock | None = None
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._db: sqlite3.Connection | None = self._connect()
        self._files = database.files_of(self.path) if not read_only else {}

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str]) -> Self:
        return cls(path, read_only=True)

    def _connect(self) -> sqlite3.Connection:
        if self.path == database.MEMORY:
            if self.read_only:
                raise ValueError("a buffer in memory cannot be opened by a reader: give the path of a file")
            return database.connect_memory()
        if self.read_only:
            return database.connect_reader(self.path)
        if os.path.exists(self.path) and os.path.getsize(self.path):
            database.inspect(self.path)  # before the lock: not even a lock file is left beside a file of others
        self._writer_lock = database.lock_for_writing(self.path)
        try:
            return database.connect_writer(self.path)
        except BaseException:
            self._writer_lock.release()
            raise

    # ---------------------------------------------------------------- writing

    def add(self, samples: Iterable[Sample]) -> list[int]:
        """Store the samples, all or none, and return their ids: 1, 2, 3, … in order. On return they are on disk.

        Steps never go back: a sample of an earlier step than the newest stored one means that a resumed run forgot to
        call `forget_after`, and is refused.
        """
        batch = list(samples)
        if not batch:
            return []
        with self._writing(f"adding {len(batch)} samples") as db:
            first = totals.load(db).next_id
            # Step by step, since a rewind may cut between any two.
            for step, of_step in itertools.groupby(batch, key=lambda sample: int(sample.step)):
                self._add_step(db, step, list(of_step))
        return list(range(first, first + len(batch)))

    def _add_step(self, db: sqlite3.Connection, step: int, samples: list[Sample]) -> None:
        before = totals.load(db)
        if step < before.step:
            raise SampleBufferError(
                f"{self.path}: a sample of step {step} comes after step {before.step} was stored; to go on from "
                f"step {step}, call forget_after({step - 1}) first"
            )
        keys: dict[str, int] = {}
        checksums: list[tuple[int, int]] = []
        for sample_id, sample in enumerate(samples, before.next_id):
            try:
                if sample.id is not None:
                    raise ValueError(f"it already has id {sample.id}, add only new samples and not replayed ones")
                if sample.query_id not in keys:
                    keys[sample.query_id] = database.query_key(db, sample.query_id)
                checksums.append((sample_id, codec.insert(db, sample, sample_id, keys[sample.query_id])))
            except (ValueError, TypeError) as error:  # UnicodeEncodeError is a ValueError
                raise SampleBufferError(
                    f"{self.path}: a sample of query {sample.query_id!r} at step {step} cannot be stored: {error}; "
                    "drop or repair it and add the batch again, nothing of it was stored"
                ) from error
        totals.enter_attempts(db, step, samples, keys)
        after = before.plus(step, samples, max(before.queries, *keys.values()))
        totals.save(db, evict(db, after, keys.values(), self.per_query, self.total))
        totals.extend_digest(db, step, checksums)

    def note_joined(self, step: int, samples: Iterable[Sample]) -> None:
        """Count that each of these samples joined a group at this step, by its text."""
        joined = list(samples)
        if joined:
            with self._writing(f"counting {len(joined)} replayed samples") as db:
                notes.add(db, step, joined, dict(self._known(db, {s.query_id for s in joined})))

    def keep_logprobs(self, step: int, joined: Iterable[tuple[Sample, FloatArray]]) -> None:
        """Keep the log-probs that samples had when they joined a group at this step."""
        known = list(joined)
        if known:
            with self._writing(f"keeping log-probs of {len(known)} replayed samples") as db:
                notes.keep(db, step, known, dict(self._known(db, {s.query_id for s, _ in known})))

    def note_late_pairs(self, step: int, groups: Iterable[tuple[float, int]]) -> None:
        """Store for each group of this step how many pairs of late answers were ranked right, of how many."""
        counted = list(groups)
        if counted:
            with self._writing(f"noting the pairs of {len(counted)} groups") as db:
                notes.add_late_pairs(db, step, counted)

    def forget_after(self, step: int) -> Rewound:
        """Go back to the exact state at the end of `step`: contents, ledger, statistics and the next id.

        Samples of later steps are removed; samples that were evicted by later steps return. -1 forgets everything.
        """
        with self._writing(f"rewinding to step {step}") as db:
            (settled,) = db.execute("SELECT step FROM settled").fetchone()
            if step < settled:
                raise SampleBufferError(
                    f"{self.path}: cannot rewind to step {step}, settle({settled}) removed what was evicted until "
                    f"then; rewind to step {settled} or later, or start from a copy made before"
                )
            then = totals.load(db, until=step)
            db.execute("DELETE FROM trajectories WHERE id >= ?", (then.next_id,))
            removed = db.execute("DELETE FROM samples WHERE id >= ?", (then.next_id,)).rowcount
            restored = db.execute("UPDATE samples SET evicted_at = NULL WHERE evicted_at > ?", (step,)).rowcount
            db.execute("DELETE FROM attempts WHERE step > ?", (step,))
            db.execute("DELETE FROM queries WHERE key > ?", (then.queries,))
            db.execute("DELETE FROM steps WHERE step > ?", (step,))
            db.execute("DELETE FROM digests WHERE step > ?", (step,))
            notes.forget_after(db, step)
        return Rewound(removed, restored)

    def settle(self, step: int) -> int:
        """Promise that no rewind will go before `step`: remove what was evicted until then, and return how many.

        Call it with the step of the oldest checkpoint that may still be resumed. Later samples use the space again.
        """
        with self._writing(f"settling step {step}") as db:
            gone = "SELECT id FROM samples INDEXED BY evicted_by_step WHERE evicted_at <= ?"
            db.execute(f"DELETE FROM trajectories WHERE id IN ({gone})", (step,))
            removed = db.execute(
                "DELETE FROM samples INDEXED BY evicted_by_step WHERE evicted_at <= ?", (step,)
            ).rowcount
            db.execute("UPDATE settled SET step = MAX(step, ?), rows = rows + ?", (step, removed))
        return removed

    # ---------------------------------------------------------------- reading

    def history(
        self,
        query_ids: Iterable[str],
        *,
        outcome: bool | None = None,
        limit: int | None = None,
        context: ContextKind | None = None,
        since_version: int | None = None,
        distinct: bool = False,
        joined_below: int | None = None,
    ) -> dict[str, list[Sample]]:
        """The living samples of each query, newest first; an empty list for a query without any.

        `outcome`: only right (True) or only wrong (False) ones. `limit`: at most that many per query. `context`: only
        those drawn under that kind of prompt. `since_version`: only those of this policy version or later (an age
        limit). `distinct`: of equal responses, token by token, only the newest. `joined_below`: only those whose text
        joined a group less often (`note_joined`).
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be 0 or more, or None for all, not {limit}")
        conditions = {
            "outcome = ?": None if outcome is None else int(outcome),
            "reflection = ?": None if context is None else counts.number_of(context),
            "policy_version >= ?": None if since_version is None else int(since_version),
        }
        values = [value for value in conditions.values() if value is not None]
        where = [condition for condition, value in conditions.items() if value is not None]
        where += [] if joined_below is None else [f"fingerprint NOT IN ({notes.USED_UP})"]
        select = codec.newest_ids(where, -1 if limit is None else int(limit), distinct=distinct)
        histories: dict[str, list[Sample]] = {query_id: [] for query_id in _several(query_ids)}
        with self._reading("reading histories") as db:
            for query_id, key in self._known(db, histories):
                used_up = () if joined_below is None else (key, joined_below)
                for row in codec.read_newest(db, self.path, select, (key, *values, *used_up)):
                    if row.sample.query_id != query_id or row.evicted_at is not None:
                        raise damaged(self.path, f"the index of query {query_id!r} leads to sample {row.sample.id}")
                    histories[query_id].append(row.sample)
        return histories

    def attempts(
        self,
        query_ids: Iterable[str],
        *,
        context: ContextKind | None = "plain",
        since_step: int = 0,
        newest: int | None = None,
    ) -> dict[str, Attempts]:
        """Verified attempts at each query since `since_step`, evicted ones included; queries without any are absent.

        With `newest`, only the last steps of each query that together hold that many attempts (steps are not split).
        """
        reflection = None if context is None else counts.number_of(context)
        with self._reading("reading attempts") as db:
            known = self._known(db, dict.fromkeys(_several(query_ids)))
            every = {query_id: counts.attempts(db, key, reflection, since_step, newest) for query_id, key in known}
        return {query_id: attempts for query_id, attempts in every.items() if attempts is not None}

    def joins(self, query_ids: Iterable[str]) -> dict[str, dict[bytes, Joins]]:
        """How often past answers of each query joined a group, by their fingerprint; only those that did."""
        with self._reading("reading what was replayed") as db:
            known = self._known(db, dict.fromkeys(_several(query_ids)))
            return {query_id: notes.of_query(db, key) for query_id, key in known}

    def late_pairs(self, newest: int) -> list[tuple[float, int]]:
        """What `note_late_pairs` stored, for as many of the last steps as it takes to reach `newest` pairs."""
        with self._reading("reading the ranking's pairs") as db:
            return notes.late_pairs(db, newest)

    def reflected(self, newest: int) -> Reflected:
        """The last `newest` attempts under reflection (whole steps), and the plain ones at those queries and steps."""
        with self._reading("reading attempts") as db:
            return counts.reflected(db, newest)

    def success_rate(
        self,
        query_ids: Iterable[str],
        *,
        context: ContextKind | None = "plain",
        since_step: int = 0,
        newest: int | None = None,
    ) -> dict[str, float]:
        """Mean outcome of the attempts that `attempts` counts, by query; a query never tried does not appear."""
        tried = self.attempts(query_ids, context=context, since_step=since_step, newest=newest)
        return {query_id: entry.solved / entry.tried for query_id, entry in tried.items()}

    def find(self, ids: Iterable[int]) -> dict[int, Sample]:
        """The samples with these ids, evicted or not; those that are gone for good are absent."""
        with self._reading("reading samples") as db:
            rows = ((number, codec.read(db, self.path, int(number))) for number in ids)
            return {number: row.sample for number, row in rows if row is not None}

    def ledger(self, query_id: str) -> list[LedgerEntry]:
        """Every verified attempt at a query in order of steps, evicted ones included."""
        with self._reading("reading the ledger") as db:
            return counts.ledger(db, query_id)

    def overview(self, hardest: int = 20) -> Overview:
        """The buffer over time and by age, and its least solved queries. Reads every living sample's row, no arrays."""
        with self._reading("reading an overview") as db:
            return counts.overview(db, hardest)

    def contents(self, until: int | None = None) -> Contents:
        """Totals of what is stored, now or as of the end of step `until`, for a checkpoint to keep."""
        with self._reading("reading its totals") as db:
            return counts.contents(db, until)

    def settled(self) -> int:
        """The step that no rewind may pass; -1 before the first `settle`."""
        with self._reading("reading how far it can go back") as db:
            return int(db.execute("SELECT step FROM settled").fetchone()[0])

    def missing_rows(self, until: int) -> int:
        """How many samples are counted in the totals of step `until` but missing from the table."""
        with self._reading("counting its samples") as db:
            return counts.missing_rows(db, until)

    def stats(self) -> Stats:
        """Counts of what is stored, from the running totals: as fast at a million samples as at ten."""
        with self._reading("reading statistics") as db:
            return counts.stats(db, database.bytes_on_disk(self.path))

    def _known(self, db: sqlite3.Connection, query_ids: Iterable[str]) -> Iterator[tuple[str, int]]:
        for query_id in query_ids:
            row = db.execute("SELECT key FROM queries WHERE uid = ?", (query_id,)).fetchone()
            if row is not None:
                yield query_id, row[0]

    # ---------------------------------------------------------------- copies and checks

    def check(self) -> list[str]:
        """Everything wrong with the file, one line each: pages, indexes, checksums, totals. Reads all of it."""
        with self._reading("checking it") as db:
            return damage.problems(db, self.path)

    def copy(self, target: str | os.PathLike[str]) -> None:
        """Write the buffer as it is now to a file of its own, which opens like this one."""
        doing, file = explained(self.path, f"copying it to {os.fspath(target)}"), os.fspath(target)
        with self._turn, doing, closing(sqlite3.connect(file)) as copied:
            self._open_db().backup(copied)

    def export(self, target: str | os.PathLike[str]) -> int:
        """Write the whole buffer to a `.jsonl`, `.jsonl.gz` or `.parquet` file; returns how many samples it holds."""
        with self._reading(f"exporting to {os.fspath(target)}") as db:
            return exchange.export(db, self.path, os.fspath(target))

    def import_(self, source: str | os.PathLike[str]) -> int:
        """Fill this empty buffer with an exported one, ids and all; returns how many samples it now holds."""
        with self._writing(f"importing {os.fspath(source)}") as db:
            if totals.load(db) != totals.Totals():
                raise SampleBufferError(
                    f"{self.path}: holds samples already, and ids of {os.fspath(source)} would clash with theirs; "
                    "import into a new file"
                )
            return exchange.import_(db, os.fspath(source))

    # ---------------------------------------------------------------- connection

    @contextmanager
    def _reading(self, doing: str) -> Iterator[sqlite3.Connection]:
        """One consistent snapshot for all that is read inside."""
        with self._turn, explained(self.path, doing), database.transaction(self._open_db(), "BEGIN") as db:
            yield db

    @contextmanager
    def _writing(self, doing: str) -> Iterator[sqlite3.Connection]:
        """All that is written inside is on disk afterwards, or none of it."""
        if self.read_only:
            raise SampleBufferError(f"{self.path}: opened read-only; open it with SampleBuffer(path) to write")
        with self._turn, explained(self.path, doing):
            self._refuse_if_moved()
            with database.transaction(self._open_db(), "BEGIN IMMEDIATE") as db:
                yield db
            self._files = database.files_of(self.path)

    def _refuse_if_moved(self) -> None:
        """Writing into a file that was removed or replaced would succeed, and be lost when we close it."""
        now = database.files_of(self.path)
        for name, file in self._files.items():
            if now.get(name) != file:
                raise SampleBufferError(
                    f"{name}: removed or replaced while it was being written to; nothing more is stored: put it back "
                    "as it was, then go on from there"
                )

    def _open_db(self) -> sqlite3.Connection:
        if os.getpid() != self._pid:
            raise SampleBufferError(
                f"{self.path}: opened by process {self._pid}, used in its fork {os.getpid()}; open a reader of its own "
                "there with SampleBuffer.open_reader"
            )
        if self._db is None:
            raise SampleBufferError(f"{self.path}: already closed; open it again")
        return self._db

    def close(self) -> None:
        """Close the file. Closing twice, or in a forked child (where nothing is held), does nothing."""
        if os.getpid() != self._pid:
            return
        with self._turn, explained(self.path, "closing it"):
            if self._db is not None:
                self._db.close()
                self._db = None
            if self._writer_lock is not None:
                self._writer_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _several(query_ids: Iterable[str]) -> Iterable[str]:
    if isinstance(query_ids, str):
        raise ValueError(
            f"query_ids must be several ids, not the text {query_ids!r}; for one query give [{query_ids!r}]"
        )
    return query_ids
