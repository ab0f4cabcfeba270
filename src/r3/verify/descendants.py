"""Counting and ending everything that a process has started, and nothing else. Linux only.

A control group would need rights that users do not have. Instead the fork server adopts what a worker leaves behind
(PR_SET_CHILD_SUBREAPER), and everything started in a cage has the cage's mark in its environment. On other systems
these functions find nothing.
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
    """Become the parent of processes that this process's descendants leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the parent dies: a hung worker would not notice its channel closing. Linux only."""
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
    """The children of a process, and theirs, all the way down."""
    listed: list[int] = []
    parents = [pid]
    while parents:
        started = [child for parent in parents for child in _children(parent)]
        listed += started
        parents = started
    return listed


def living(pids: Iterable[int]) -> list[int]:
    """Which of these have not ended."""
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
    """End every process with a cage's mark: those left when the fork server itself was killed."""
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
    for number in (signal.SIGSTOP, signal.SIGKILL):  # first stop them all, so that none starts another meanwhile
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
