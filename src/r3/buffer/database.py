"""The SQLite file: its tables, how a connection to it is opened, and what its errors mean.

queries       a small integer for each query id, dense, in order of first appearance
samples       one row per sample, without its arrays, so that a million of them stay small enough to search
trajectories  the arrays (see `codec`), in a table of their own
attempts      the ledger behind `success_rate`: verified attempts by query, context and step; never evicted
steps         running totals at the end of each step: `stats` reads the last row, `forget_after` goes back to an earlier
digests       at the end of each step, a running digest of all checksums ever stored (see `totals`); files of earlier
              versions have none
joined, late_pairs  what the algorithm notes where a setting asks for it (see `notes`)
settled       one row: the step that no rewind may pass, and how many evicted rows were removed for good
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from r3.buffer import notes
from r3.errors import R3Error
from r3.locks import FileLock, Locked

MEMORY = ":memory:"
VERSION = 1
APPLICATION_ID = 0x72335342  # "r3SB"

# A response's blob fills whole pages but for its last; 4 KiB wastes about 1 KiB per sample where 16 KiB would waste 4.
PAGE_SIZE = 4096

_SMALLEST_DATABASE = 512

# `reflection` is the number of a context in samples.CONTEXT_KINDS: 1 for reflection, which once was the only other one.
# The indexes on living samples end in the row id, as every SQLite index does: each is in order of age.
_SCHEMA = """
CREATE TABLE queries (key INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY,
    query INTEGER NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    outcome INTEGER,
    reward REAL NOT NULL,
    reward_parts TEXT NOT NULL,
    truncated INTEGER NOT NULL,
    reflection INTEGER NOT NULL,
    shown INTEGER,
    length INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    verdict TEXT NOT NULL,
    crc INTEGER NOT NULL,
    evicted_at INTEGER
);
CREATE INDEX alive_by_query ON samples (query, outcome) WHERE evicted_at IS NULL;
CREATE INDEX alive_by_age ON samples (outcome IS 1) WHERE evicted_at IS NULL;
CREATE INDEX evicted_by_step ON samples (evicted_at) WHERE evicted_at IS NOT NULL;
CREATE TABLE trajectories (id INTEGER PRIMARY KEY, arrays BLOB NOT NULL);
CREATE TABLE attempts (
    query INTEGER NOT NULL,
    reflection INTEGER NOT NULL,
    step INTEGER NOT NULL,
    tried INTEGER NOT NULL,
    solved INTEGER NOT NULL,
    PRIMARY KEY (query, reflection, step)
) WITHOUT ROWID;
CREATE INDEX attempts_by_step ON attempts (step);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    next_id INTEGER NOT NULL,
    queries INTEGER NOT NULL,
    solved INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    unverified INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    evicted INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    tried INTEGER NOT NULL,
    tried_solved INTEGER NOT NULL
);
CREATE TABLE settled (step INTEGER NOT NULL, rows INTEGER NOT NULL);
INSERT INTO settled VALUES (-1, 0);
"""

# Apart from the schema, whose version they do not raise: files without them are read and written by all versions.
_LATER = (
    "CREATE TABLE IF NOT EXISTS digests (step INTEGER PRIMARY KEY, digest BLOB NOT NULL)",
    *notes.TABLES,
)


def lock_for_writing(path: str) -> FileLock:
    """The lock `<path>.lock` of the only writer, or a `SampleBufferError` that names who holds it.

    SQLite itself would let two processes take turns at writing, which is no corruption but mixes two runs in one file.
    """
    try:
        return FileLock(path + ".lock")
    except Locked as holder:
        raise SampleBufferError(
            f"{path}: {holder} is already writing to it; stop that process, or open it here with "
            "SampleBuffer.open_reader"
        ) from holder
    except OSError as error:
        raise SampleBufferError(
            f"{path}: cannot create the lock file {path}.lock ({error.strerror}); check that its directory exists "
            "and may be written, or open the buffer read-only"
        ) from error


def connect_memory() -> sqlite3.Connection:
    db = _connect(MEMORY)
    _create_tables(db)
    return db


def connect_writer(path: str) -> sqlite3.Connection:
    """Open `path` for writing, creating it if it is missing or empty. The caller holds the writer lock."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        _create(path)
    inspect(path)
    with explained(path, "opening it"):
        db = _connect(_uri(path, "mode=rw"))
        _tune(db)
        # An acknowledged sample survives a power cut, not only a killed process.
        db.execute("PRAGMA synchronous = FULL")
        # After a long reader the log may have grown to gigabytes: give back all beyond two steps' worth.
        db.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
        # Some builds overwrite deleted pages with zeros, which doubles the cost of `settle`; nothing here is secret.
        db.execute("PRAGMA secure_delete = OFF").fetchone()
        for table in _LATER:
            db.execute(table)
    return db


def connect_reader(path: str) -> sqlite3.Connection:
    inspect(path)
    # Readers share a small index file with the writer. Where it cannot be made (a read-only disk) there is no writer
    # either, and a file without a pending log may be read as it is. (A writer of other rights that starts later is not
    # noticed: open the reader again.)
    frozen = not os.access(Path(path).resolve().parent, os.W_OK) and not os.path.exists(path + "-wal")
    with explained(path, "opening it"):
        db = _connect(_uri(path, "mode=ro&immutable=1" if frozen else "mode=ro"))
        _tune(db)
    return db


@contextmanager
def transaction(db: sqlite3.Connection, begin: str) -> Iterator[sqlite3.Connection]:
    """Commit everything done inside the block, or nothing."""
    db.execute(begin)
    try:
        yield db
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # something failed above, and SQLite has not rolled back by itself
            db.execute("ROLLBACK")


def inspect(path: str) -> None:
    """Refuse a file that is no sample buffer or of a later version, without changing it, its locks or files beside it.

    Through SQLite and not with `open`: closing a plain descriptor would drop the locks that another connection of this
    process holds on the same file (POSIX locks belong to the process). `immutable` takes no lock and makes no file.
    """
    if not os.path.isfile(path):
        raise SampleBufferError(f"{path}: no such file; check the path, or open it for writing to create it")
    with explained(path, "reading its header"):
        db = _connect(_uri(path, "mode=ro&immutable=1"))
        try:
            # The last writer may have died, or met a full disk, while it moved its log into the file. Then the file by
            # itself looks malformed; this setting reads the header none the less.
            db.execute("PRAGMA writable_schema = ON")
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_NOTADB:
                raise
            raise _not_a_buffer(path) from error
        finally:
            db.close()
    if os.path.getsize(path) < _SMALLEST_DATABASE:  # which SQLite takes for an empty one
        raise _not_a_buffer(path)
    if application != APPLICATION_ID:
        raise SampleBufferError(
            f"{path}: a SQLite file of another program (application id {application:#x}); it was left as it is: "
            "choose another path"
        )
    if version != VERSION:
        raise SampleBufferError(
            f"{path}: written with buffer schema {version}, this r3 knows {VERSION}; upgrade r3 to read it"
        )


def _not_a_buffer(path: str) -> SampleBufferError:
    return SampleBufferError(
        f"{path}: not a sample buffer (no SQLite header); it was left as it is: choose another path, or put a backup "
        "back if it was one"
    )


def _create(path: str) -> None:
    """Create the file under another name and rename it, so that a half-made one is never found."""
    new = path + ".new"
    for leftover in (new, new + "-wal", new + "-shm", new + "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(leftover)
    with explained(path, "creating it"):
        db = _connect(_uri(new, "mode=rwc"))
        try:
            db.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            _create_tables(db)
            db.execute("PRAGMA journal_mode = WAL").fetchone()  # kept in the file: readers never block the writer
        finally:
            db.close()
    os.replace(new, path)
    sync_directory(path)


def _create_tables(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.executescript(f"BEGIN; {_SCHEMA} {'; '.join(_LATER)}; COMMIT;")


def files_of(path: str) -> dict[str, tuple[int, int]]:
    """Device and inode of the files that have the buffer's names now."""
    files = {}
    for name in () if path == MEMORY else (path, path + "-wal"):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name)
            files[name] = status.st_dev, status.st_ino
    return files


def query_key(db: sqlite3.Connection, query_id: str) -> int:
    """The integer of a query; SQLite gives a new one the next after the greatest, so that they stay dense."""
    row = db.execute("SELECT key FROM queries WHERE uid = ?", (query_id,)).fetchone()
    if row is None:
        db.execute("INSERT INTO queries (uid) VALUES (?)", (query_id,))
        return query_key(db, query_id)
    return int(row[0])


def bytes_on_disk(path: str) -> int:
    """The size of the buffer and its log; 0 in memory."""
    return sum(os.path.getsize(name) for name in files_of(path))


def sync_directory(path: str) -> None:
    """Make a rename in the directory of `path` survive a power cut."""
    fd = os.open(Path(path).resolve().parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _connect(target: str) -> sqlite3.Connection:
    # Transactions are opened and closed by hand; threads take turns under the buffer's own lock.
    return sqlite3.connect(target, timeout=30, isolation_level=None, check_same_thread=False, uri=target != MEMORY)


def _tune(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA cell_size_check = ON")  # notice damaged pages when they are read
    # Enough to hold the upper levels of every index at a million samples. The pages of the arrays pass through once;
    # the operating system caches them better. Not memory-mapped: mapped pages count as the process's memory, and a
    # failing disk would kill it with SIGBUS instead of an error.
    db.execute(f"PRAGMA cache_size = {-64 * 1024}")
    db.execute("PRAGMA mmap_size = 0").fetchone()


def _uri(path: str, options: str) -> str:
    return f"file:{quote(os.path.abspath(path))}?{options}"


# ---------------------------------------------------------------------- errors


class SampleBufferError(R3Error, RuntimeError):
    """The buffer refused or could not finish something; what was already stored is untouched."""


def damaged(path: str, detail: str) -> SampleBufferError:
    """The error for stored data that is not what was written."""
    return SampleBufferError(
        f"{path}: the file is damaged ({detail}); copy every readable sample to a new file with "
        f"r3.buffer.salvage({path!r}, 'new.sqlite')"
    )


@contextmanager
def explained(path: str, doing: str) -> Iterator[None]:
    """Turn an SQLite error raised inside the block into a `SampleBufferError` about `path`."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, doing, error) from error


def _explain(path: str, doing: str, error: sqlite3.Error) -> SampleBufferError:
    code = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", "no SQLite code")
    if code is None and isinstance(error, sqlite3.OperationalError):
        return damaged(path, str(error))  # the only error Python raises by itself here: stored text that is not UTF-8
    primary = (code or 0) & 0xFF  # extended codes keep the primary one in their low byte
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or name in _UNREADABLE:
        return damaged(path, f"{name} while {doing}: {error}")
    fix = _FIXES.get(primary)
    if primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        fix = f"{_free(path)}; nothing stored before is lost: free space (or lift the file size limit) and try again"
    if fix is None:
        fix = "nothing stored before is lost; this is unexpected, please report it"
    return SampleBufferError(f"{path}: {doing} failed ({name}: {error}); {fix}")


# I/O errors of reading; all other I/O errors are of writing.
_UNREADABLE = ("SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS")
_FIXES = {
    sqlite3.SQLITE_BUSY: "another program keeps the file locked: close it there and try again",
    sqlite3.SQLITE_LOCKED: "another program keeps the file locked: close it there and try again",
    sqlite3.SQLITE_READONLY: "the file or its directory is read-only: make both writable, or open it read-only",
    sqlite3.SQLITE_PERM: "the file may not be read: fix its permissions",
    sqlite3.SQLITE_CANTOPEN: "check that its directory exists and may be written, and that the path is a file",
}


def _free(path: str) -> str:
    parent = Path(path).resolve().parent
    return f"{shutil.disk_usage(parent).free:,} bytes are free in {parent}" if parent.exists() else f"no {parent}"
