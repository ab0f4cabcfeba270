"""A lock on a file that dies with the process that took it: one trainer per run directory, one writer per buffer.

It is `flock`'s, which belongs to the open file and so to forked children too: they close their copy at once, or a
surviving worker would keep a dead run locked. The file stays behind after use; only the lock on it counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref


class Locked(Exception):
    """Another holder lives; the message names it."""


class FileLock:
    """Held from construction to `release`; `Locked` while any other holder, in this process or another, lives.

    With `note`, the file is there for the lock alone and names its holder; without, it is a file of data whose content
    is left alone. OSError where the file cannot be opened or the file system has no locks.
    """

    def __init__(self, path: str | os.PathLike[str], *, note: bool = True) -> None:
        self._fd: int | None = None
        self._notes = note
        self._take(path)
        while not self._is_in_place(path):  # put aside between our opening and our locking it
            self._close()
            self._take(path)
        self._note(f"process {os.getpid()} on {socket.gethostname()}\n")
        _held.add(self)

    def _take(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 256, 0).decode("utf-8", "replace").strip() if self._notes else ""
            self._close()
            raise Locked(holder or "another process") from error
        except OSError:
            self._close()
            raise

    def _is_in_place(self, path: str | os.PathLike[str]) -> bool:
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others have it. Releasing twice does nothing."""
        if self._fd is not None:
            self._note("")
            self._close()

    def __del__(self) -> None:
        self._close()  # of an owner that was dropped without being closed

    def _note(self, holder: str) -> None:
        """Leave our name for the refusal. On a full disk it may be missing; the lock still holds."""
        assert self._fd is not None
        if not self._notes:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder.encode(), 0)

    def _close(self) -> None:
        fd, self._fd = getattr(self, "_fd", None), None
        if fd is not None:
            os.close(fd)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_drop_inherited)
