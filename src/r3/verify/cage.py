"""Judges in processes that can be killed: a hung, bloated or crashed case costs itself and nothing else.

A thread keeps each worker. It sends a few cases at once, waits for one answer after the other, and gives each the same
wall time. When an answer does not come, the worker is killed and replaced by a fresh fork (milliseconds), the case it
hung on is answered "timeout", and the cases behind it go back to the queue.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from r3.verify import messages
from r3.verify.base import VerifierError

_START_SECONDS = 120.0  # importing sympy on a busy machine, or a user's module
_CHUNK = 8
_WORN_OUT = 2_000  # cases after which a worker is replaced: sympy's caches only grow
# The child gets the parent's import path, so that it finds the same r3 and the user's own modules.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from r3.verify.forkserver import main; main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class CageSettings:
    """What runs in the cage, and what it may take."""

    target: str  # dotted path of the function that judges
    workers: int = 2
    seconds: float = 1.0  # of wall time for one case
    memory_mb: int = 1024
    sealed: bool = True  # no files, sockets or programs
    preload: bool = True  # import the target once, before forking; not for modules that start threads
    warm_up: tuple[dict[str, Any], ...] = ()  # cases judged once before the first fork

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 2:
            raise ValueError(f"seconds={self.seconds}: a case must end within 2 s; give 0 < seconds <= 2")
        if self.workers < 1 or self.memory_mb < 256:
            raise ValueError(f"workers={self.workers}, memory_mb={self.memory_mb}: at least 1 and 256 are needed")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one case: a result, or how it failed (timeout, memory, crashed, error)."""

    result: Any = None
    failed: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Task:
    case: dict[str, Any]
    future: Future[Answer] = field(default_factory=Future)
    retried: bool = False


class Cage:
    """A pool of killable workers. Any thread may submit; close it, or let it go out of use with its process."""

    def __init__(self, settings: CageSettings) -> None:
        self.settings = settings
        self._tasks: queue.SimpleQueue[list[_Task] | None] = queue.SimpleQueue()
        self._forkserver = _ForkServer(settings)
        self._closed = False
        self._keepers = [
            threading.Thread(target=self._keep, name=f"r3-verify-{i}", daemon=True) for i in range(settings.workers)
        ]
        for keeper in self._keepers:
            keeper.start()

    def submit(self, cases: Iterable[dict[str, Any]]) -> list[Future[Answer]]:
        """Futures of the cases, in order. They always end in an Answer, unless the cage itself cannot work."""
        if self._closed:
            raise VerifierError("this verifier is closed; make a new one")
        tasks = [_Task(case) for case in cases]
        share = max(1, min(_CHUNK, -(-len(tasks) // self.settings.workers)))
        for start in range(0, len(tasks), share):
            self._tasks.put(tasks[start : start + share])
        return [task.future for task in tasks]

    def close(self) -> None:
        """End every process and thread; cases still waiting are cancelled."""
        self._closed = True
        for _ in self._keepers:
            self._tasks.put(None)
        self._forkserver.close()  # takes the workers along, so that no keeper waits for one
        for keeper in self._keepers:
            if keeper is not threading.current_thread():
                keeper.join()
        with contextlib.suppress(queue.Empty):
            while True:
                for task in self._tasks.get_nowait() or ():
                    task.future.cancel()

    def _keep(self) -> None:
        worker: _Worker | None = None
        while (chunk := self._tasks.get()) is not None:
            try:
                if worker is None:
                    worker = self._forkserver.fork()
                worker = self._run(worker, chunk)
            except (VerifierError, OSError) as error:
                worker = None
                for task in chunk:
                    if not task.future.done():
                        task.future.set_exception(VerifierError(f"the verifier's processes cannot run: {error}"))
        if worker is not None:
            worker.channel.close()

    def _run(self, worker: _Worker, chunk: Sequence[_Task]) -> _Worker | None:
        """Have a worker answer a chunk; the worker, or None if it had to be ended."""
        answered = 0
        started = time.monotonic()
        try:
            messages.send(worker.channel, [task.case for task in chunk])
            for task in chunk:
                reply = messages.receive(worker.channel, started + self.settings.seconds)
                now = time.monotonic()
                task.future.set_result(answer := Answer(**reply, seconds=now - started))
                answered, started = answered + 1, now
                worker.cases = _WORN_OUT if answer.failed == "memory" else worker.cases + 1
            if worker.cases < _WORN_OUT:
                return worker
            failed = ""
        except TimeoutError:
            failed = "timeout"
        except (EOFError, OSError, ValueError):
            failed = "crashed"
        self._forkserver.reap(worker)
        left = list(chunk[answered:])
        if left and (failed == "timeout" or left[0].retried):
            left.pop(0).future.set_result(Answer(failed=failed, seconds=time.monotonic() - started))
        elif left:
            left[0].retried = True  # its worker may have died of something else
        for task in left:  # one by one, so that several hung cases spread over the workers
            self._tasks.put([task])
        return None


@dataclass(slots=True)
class _Worker:
    pid: int
    channel: socket.socket
    generation: int  # of the fork server that it belongs to
    cases: int = 0  # judged so far


class _ForkServer:
    """The parent's side of the fork server process: started on first use, and again if it dies."""

    def __init__(self, settings: CageSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._generation = 0
        self._closed = False

    def fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                pid = self._ask_for(theirs)
                generation = self._generation
            messages.receive(ours, time.monotonic() + _START_SECONDS)
        except VerifierError:
            ours.close()
            raise
        except (OSError, EOFError) as error:
            ours.close()
            raise VerifierError(
                f"a worker for {self._settings.target} did not start ({type(error).__name__}); check that it can be "
                f"imported and that {self._settings.memory_mb} MB are enough for that"
            ) from error
        return _Worker(pid, ours, generation)

    def reap(self, worker: _Worker) -> None:
        """End a worker. The fork server is its parent: only there can no other process have taken over its pid."""
        worker.channel.close()
        with self._lock:
            if self._control is None or worker.generation != self._generation:
                return  # it died with its fork server
            try:
                self._control.sendall(str(worker.pid).encode())
                messages.receive(self._control, time.monotonic() + _START_SECONDS)
            except (EOFError, OSError):
                self._end()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _ask_for(self, theirs: socket.socket) -> int:
        for _ in range(2):  # a fork server that died since is found out here, and started once more
            try:
                control = self._control or self._start()
                socket.send_fds(control, [b"fork"], [theirs.fileno()])
                return int(messages.receive(control, time.monotonic() + _START_SECONDS))
            except (EOFError, OSError):
                self._end()
        raise VerifierError(
            f"the process that should load {self._settings.target} dies; its last words are on standard error, and "
            "math-verify must be installed"
        )

    def _start(self) -> socket.socket:
        if self._closed:
            raise VerifierError("this verifier is closed; make a new one")
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._control, self._generation = ours, self._generation + 1
        s = self._settings
        messages.send(
            ours,
            {
                "target": s.target,
                "memory_mb": s.memory_mb,
                "sealed": s.sealed,
                "preload": s.preload,
                "warm_up": list(s.warm_up),
            },
        )
        messages.receive(ours, time.monotonic() + _START_SECONDS)
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
