"""One writer at a time: the file `<path>.lock` beside the buffer.

SQLite itself would let two processes take turns at writing, which is no corruption but mixes two runs in one file.
"""

from __future__ import annotations

from r3.buffer.errors import SampleBufferError
from r3.locks import FileLock, Locked


def lock_for_writing(path: str) -> FileLock:
    """The lock, or a `SampleBufferError` that names who holds it."""
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
