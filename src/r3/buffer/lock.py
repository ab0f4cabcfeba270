"""One writer at a time: an advisory lock on `<path>.lock` that dies with the process that took it.

SQLite itself would let two processes take turns at writing, which is no corruption but mixes two runs in one file.
The lock file stays behind after use; only the lock on it counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

from r3.buffer.errors import SampleBufferError


class WriterLock:
    """Held from construction to `release`; refuses when any other writer, in this process or another, holds it."""

    def __init__(self, path: str) -> None:
        self.path = path + ".lock"
        self._fd: int | None = None
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SampleBufferError(
                f"{path}: cannot create the lock file {self.path} ({error.strerror}); check that its directory exists "
                "and may be written, or open the buffer read-only"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            self._close()
            raise SampleBufferError(
                f"{path}: process {holder or 'unknown'} is already writing to it; stop that process, or open it here "
                "with SampleBuffer.open_reader"
            ) from error
        self._note(f"{os.getpid()}\n")
        _held.add(self)

    def release(self) -> None:
        if self._fd is not None:
            self._note("")
            self._close()

    def __del__(self) -> None:
        self._close()  # of a buffer that was dropped without being closed

    def _note(self, text: str) -> None:
        """Leave our process id for the message above. On a full disk the note may be missing; the lock still holds."""
        assert self._fd is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    """A forked child shares the lock, and would keep it after its parent's death: close it there, unlocking nothing."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_drop_inherited)
