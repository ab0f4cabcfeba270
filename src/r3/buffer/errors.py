"""One error type for the buffer, and the translation of SQLite's codes into a line that names the file and the fix."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from r3.errors import R3Error


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
    """Raise whatever SQLite raises inside as a `SampleBufferError` about `path`."""
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


# Input errors of a disk that does not give back what it was given; the other input and output errors are of writing.
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
