"""Functions to be caged in tests: honest ones, and ones with every fault that a judge can have."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
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


def work(seconds: float, **columns: Any) -> float:
    """As much processor time, however long that takes."""
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass
    return 1.0


def logged(case: str, log: str, **columns: Any) -> float:
    """Writes when it starts and ends; a case that says so hangs at its first try."""
    path = Path(log)
    with path.open("a") as lines:
        lines.write(f"start {case}\n")
    if "hangs" in case and path.read_text().count(f"start {case}\n") == 1:
        _hang()
    work(0.02)
    with path.open("a") as lines:
        lines.write(f"end {case}\n")
    return 1.0


_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def start(how: str, **columns: Any) -> Any:
    """Starts programs that would outlive it, and then does what `how` says."""
    if how == "detached":  # as a daemon does: a session of its own, and no parent
        source = (
            f"import subprocess; print(subprocess.Popen({_SLEEP!r}, start_new_session=True, stdout=-3, stderr=-3).pid)"
        )
        return int(subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout)
    if how == "many":
        for _ in range(200):
            subprocess.Popen(_SLEEP)
        _hang()
    pid = subprocess.Popen(_SLEEP).pid
    Path(columns["note"]).write_text(str(pid))
    if how == "and hang":
        _hang()
    if how == "and die":
        os.kill(os.getpid(), signal.SIGKILL)
    return pid


def forge(what: str, **columns: Any) -> bool:
    """Wrong, but it writes to every open channel that would say otherwise."""
    for name in os.listdir("/proc/self/fd"):
        try:
            channel = socket.socket(fileno=os.dup(int(name)))
            channel.setblocking(False)
            channel.sendall(_FORGERIES[what])
        except OSError:
            continue
    return False


def _message(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


_FORGERIES = {
    "nothing": b"",
    "right": _message(b'{"result": true}'),
    "right, with a number": _message(b'{"nonce": "0", "result": true}'),
    "a list": _message(b"[1]"),
    "other keys": _message(b'{"results": [true], "failed": 3}'),
    "no JSON": _message(b"\xff\x00{"),
    "deep": _message(b"[" * 100_000),
    "huge": b"\xff\xff\xff\xff" + b"x" * 1000,
    "large": (2**24).to_bytes(4, "big") + b"x" * 1000,
    "cut": (100).to_bytes(4, "big") + b"x",
    "many": _message(b'{"result": true}') * 20,
}


_ACTS = {
    "fine": lambda: 1,
    "hang": _hang,
    "hang in C": _hang_in_c,
    "bloat": _bloat,
    "segfault": _segfault,
    "kill the fork server": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(60)),
    "kill the group": lambda: os.killpg(0, signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close everything": lambda: os.closerange(3, 1024),
    "exit": lambda: sys.exit(3),
    "say much": lambda: "x" * 2**21,
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
