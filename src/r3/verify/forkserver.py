"""The inside of the cage: a process that imports the judge once and forks cheap workers that can be killed.

It is started as a fresh interpreter, so that it shares no threads, locks or CUDA state with its parent, and it never
runs a thread itself, so that forking it is safe. It holds one end of a control socket; when the other end is gone, or
its parent is, it ends, and its workers with it. Each worker leads its own session. Everything that a worker started is
ended with it, even if detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from r3.verify import descendants, messages

_PARENT_CHECK_SECONDS = 1.0  # a forked sibling may hold a copy of the control socket: then only this shows it
_OPEN_FILES = 64


def main(control_fd: int) -> None:
    """Serve fork and reap requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what to do
    parent = os.getppid()
    descendants.adopt_orphans()
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    settings = messages.receive(control)
    if settings["preload"]:
        target(settings["target"])
        for case in settings["warm_up"]:
            _answer(target(settings["target"]), case)
    messages.send(control, "ready")
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([control], [], [], _PARENT_CHECK_SECONDS)
            if os.getppid() != parent or (readable and not _serve(control, settings, workers)):
                return
    finally:
        descendants.end_all_but(())


def _serve(control: socket.socket, settings: dict[str, Any], workers: set[int]) -> bool:
    """One request: a file descriptor asks for a worker behind it, a number asks to end and reap that worker."""
    data, fds, _, _ = socket.recv_fds(control, 32, 1)
    if not data:
        return False
    if not fds:
        workers.discard(pid := int(data))
        _reap(pid)
        if not settings["sealed"]:
            descendants.end_all_but(workers)
        messages.send(control, pid)
        return True
    pid = os.fork()
    if pid == 0:
        _work(control, fds[0], settings)
    os.close(fds[0])
    workers.add(pid)
    messages.send(control, pid)
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
        descendants.die_with_parent()
        os.setsid()
        descendants.adopt_orphans()
        control.close()
        os.set_inheritable(fd, False)  # no program that a judge starts holds the channel
        channel = socket.socket(fileno=fd)
        _limit(settings["memory_mb"], sealed=settings["sealed"])
        function = target(settings["target"])
        send, receive = messages.send, messages.receive
        send(channel, "ready")
        while True:
            # One case at a time, each with a number of its own that its reply must repeat: what a case's code writes to
            # the channel cannot pass for the reply to a later one.
            nonce, case = receive(channel)
            send(channel, {"nonce": nonce, **_answer(function, case)})
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
