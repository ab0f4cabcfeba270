"""The inside of the cage: a process that imports the judge once and forks cheap workers that can be killed.

It is started as a fresh interpreter, so that it shares no threads, locks or CUDA state with its parent, and it never
runs a thread itself, so that forking it is safe. It holds one end of a control socket; when the other end is gone, or
its parent is, it ends, and its workers with it. Each worker leads its own session. Everything that a worker started is
ended with it, even if detached.

Messages between the cage and its processes (`send`, `receive`) are JSON with a length in front, never pickle: workers
are not trusted. JSON escapes carry NUL bytes and lone surrogates unharmed.

Everything that a process has started is counted and ended, and nothing else (`descendants`, `end_marked`); Linux only.
A control group would need rights that users do not have. Instead the fork server adopts what a worker leaves behind
(PR_SET_CHILD_SUBREAPER), and everything started in a cage has the cage's mark in its environment. On other systems
these functions find nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

_PARENT_CHECK_SECONDS = 1.0  # a forked sibling may hold a copy of the control socket: then only this shows it
_OPEN_FILES = 64


def main(control_fd: int) -> None:
    """Serve fork and reap requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what to do
    parent = os.getppid()
    adopt_orphans()
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    settings = receive(control)
    if settings["preload"]:
        target(settings["target"])
        for case in settings["warm_up"]:
            _answer(target(settings["target"]), case)
    send(control, "ready")
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([control], [], [], _PARENT_CHECK_SECONDS)
            if os.getppid() != parent or (readable and not _serve(control, settings, workers)):
                return
    finally:
        end_all_but(())


def _serve(control: socket.socket, settings: dict[str, Any], workers: set[int]) -> bool:
    """One request: a file descriptor asks for a worker behind it, a number asks to end and reap that worker."""
    data, fds, _, _ = socket.recv_fds(control, 32, 1)
    if not data:
        return False
    if not fds:
        workers.discard(pid := int(data))
        _reap(pid)
        if not settings["sealed"]:
            end_all_but(workers)
        send(control, pid)
        return True
    pid = os.fork()
    if pid == 0:
        _work(control, fds[0], settings)
    os.close(fds[0])
    workers.add(pid)
    send(control, pid)
    return True


def _reap(pid: int) -> None:
    """End a worker. Only this process reaps, so a pid is never another's by now."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(control: socket.socket, fd: int, settings: dict[str, Any]) -> NoReturn:
    """The worker: judge cases until the channel closes. It leaves without running the parent's exit handlers."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        adopt_orphans()
        control.close()
        os.set_inheritable(fd, False)  # no program that a judge starts holds the channel
        channel = socket.socket(fileno=fd)
        _limit(settings["memory_mb"], sealed=settings["sealed"])
        function = target(settings["target"])
        reply, await_case = send, receive
        reply(channel, "ready")
        while True:
            # One case at a time, each with a number of its own that its reply must repeat: what a case's code writes to
            # the channel cannot pass for the reply to a later one.
            nonce, case = await_case(channel)
            reply(channel, {"nonce": nonce, **_answer(function, case)})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0
    finally:
        os._exit(code)


def _answer(function: Callable[..., Any], case: dict[str, Any]) -> dict[str, Any]:
    """The function's result for one case; an exception is a result too, counted under its name."""
    try:
        result = function(*case["args"], **case["kwargs"])
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"result": json.loads(json.dumps(result, default=float))}
    except MemoryError:
        return {"failed": "memory"}
    except (Exception, SystemExit) as error:  # noqa: BLE001 a judge's fault must not take the worker along
        return {"failed": "error", "detail": f"{type(error).__name__}: {error}"[:500]}


async def _awaited(result: Any) -> Any:
    return await result


def _limit(memory_mb: int, *, sealed: bool) -> None:
    """Bound what a worker can take. Sealed, it can neither write, nor connect, nor start programs."""
    soft = memory_mb * 2**20
    if sys.platform == "linux":  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sealed:
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # model text must not reach the user's terminal
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.addaudithook(_refuse)


_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.kill", "shutil.", "urllib.", "ctypes.dlopen",
)  # fmt: skip
_MODULES = (".py", ".pyc", ".so")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Allow reading Python modules, which sympy imports late, and opening nothing else."""
    if event == "open":
        path, mode = str(arguments[0]), arguments[1]
        if (mode and set(str(mode)) & set("wax+")) or not path.endswith(_MODULES):
            raise PermissionError("a sealed worker opens no files")
    elif event.startswith(_REFUSED):
        raise PermissionError(f"a sealed worker may not {event}")


def target(dotted: str) -> Callable[..., Any]:
    """The function that a dotted path names."""
    module, _, name = dotted.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    assert callable(function)
    return function  # type: ignore[no-any-return]


# --------------------------------------------------------------------- messages


LARGEST_MESSAGE = 64 * 2**20
_HEAD = 4


class Malformed(ValueError):
    """Bytes that are not a valid message: their sender is no longer trusted."""


def send(channel: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Send a message. TimeoutError if the other side has not taken it by the deadline (monotonic)."""
    body = json.dumps(message, default=float).encode("ascii")
    channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
    channel.sendall(len(body).to_bytes(_HEAD, "big") + body)


def receive(channel: socket.socket, deadline: float | None = None, largest: int = LARGEST_MESSAGE) -> Any:
    """The next message. EOFError if the other side is gone, TimeoutError after the deadline, Malformed for anything
    but a valid message of at most the largest size."""
    size = int.from_bytes(_exactly(channel, _HEAD, deadline), "big")
    if size > largest:
        raise Malformed(f"a message of {size:,} bytes; {largest:,} are the most")
    body = _exactly(channel, size, deadline)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON ({type(error).__name__})") from error


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    channel.settimeout(None)
    parts = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        part = channel.recv(min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# ------------------------------------------------------------------ descendants


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
