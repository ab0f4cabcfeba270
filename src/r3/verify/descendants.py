"""What a process started, all the way down: counted, and ended without touching any other process. Linux only.

There is no control group to end: that takes rights that a user does not have. Instead the fork server adopts whatever a
worker leaves behind (PR_SET_CHILD_SUBREAPER), and everything that a cage started carries the cage's mark in its
environment. Elsewhere than on Linux these functions find nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

MARK = "R3_CAGE"  # the environment variable that names the cage
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_SWEEP = 10.0  # seconds
_CPUCLOCK_SCHED = 2


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """A hung worker reads no channel, so it would not notice. Linux only: elsewhere the channel's end must do."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise EOFError("the parent died before the line above")


def cpu_seconds(pid: int) -> float | None:
    """The processor time that a process has used; None where there is no such clock."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)  # see clock_getcpuclockid(3)
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    listed: list[int] = []
    parents = [pid]
    while parents:
        started = [child for parent in parents for child in _children(parent)]
        listed += started
        parents = started
    return listed


def living(pids: Iterable[int]) -> list[int]:
    """Those that have not ended yet."""
    return [pid for pid in pids if _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])]


def end_all_but(kept: Collection[int]) -> None:
    """End every process under this one but the given children and what they started."""
    deadline = time.monotonic() + _LONGEST_SWEEP
    while (strays := [pid for pid in _children(os.getpid()) if pid not in kept]) and time.monotonic() < deadline:
        _kill([pid for stray in strays for pid in (stray, *descendants(stray))])
        for stray in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray, 0)


def end_marked(mark: str) -> None:
    """End every process that carries a cage's mark: what is left when even the fork server was killed."""
    deadline = time.monotonic() + _LONGEST_SWEEP
    label = f"{MARK}={mark}".encode()
    while time.monotonic() < deadline:
        marked = [
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if label in _read(f"{entry}/environ").split(b"\0") and entry.name != str(os.getpid())
        ]
        if not living(marked):
            return
        _kill(marked)


def _kill(pids: Collection[int]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none starts another meanwhile
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
