"""Functions to be caged in tests: honest ones, and ones with every fault that a judge can have."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any


def equal(completion: str, answer: str, **columns: Any) -> bool:
    return completion == answer


async def equal_later(completion: str, answer: str, **columns: Any) -> float:
    return float(completion == answer)


def bonus(completion: str, bonus: float, **columns: Any) -> float:
    return bonus


def nothing(completion: str, **columns: Any) -> None:
    return None


def act(what: str, **columns: Any) -> Any:
    return _ACTS[what]()


def _hang() -> None:
    while True:
        pass


def _hang_in_c() -> int:
    return len(str(7 ** (10**9)))


def _bloat() -> int:
    return len(bytearray(8 * 2**30))


def _segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def _raise() -> None:
    raise LookupError("no such thing")


_ACTS = {
    "fine": lambda: 1,
    "hang": _hang,
    "hang in C": _hang_in_c,
    "bloat": _bloat,
    "segfault": _segfault,
    "leave": lambda: os._exit(3),
    "raise": _raise,
    "pid": os.getpid,
    "fork server": os.getppid,
    "read": lambda: Path("/etc/hostname").read_text(),
    "write": lambda: Path("/tmp/r3-verify-owned").write_text("x"),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    "run": lambda: subprocess.run(["true"], check=True),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "import": lambda: __import__("wave") is not None,
}
