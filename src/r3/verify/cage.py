"""Judges in processes that can be killed: a case that hangs, bloats or crashes harms no other.

Each worker has a thread that gives it one case after the other. A case is limited in processor time, so that a busy
machine makes a verdict late but not wrong; a limit on wall time far above it catches what sleeps. Without a valid reply
the worker is killed with everything that it started and replaced by a fresh fork (milliseconds). The case is tried once
more, with nothing else running in the cage, before it counts as "timeout", "crashed" or "error".
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from r3.verify import forkserver
from r3.verify.judge import VerifierError

_START_SECONDS = 120.0  # importing sympy on a busy machine, or a user's module
_CHUNK = 8
_PATIENCE = 30  # wall time that a case may take, in multiples of its processor time
_LOOK_AGAIN = 0.05  # seconds between looks at what a judge has started
_LARGEST_REPLY = 2**20
_SWEEP_SECONDS = 15.0  # for a fork server to end its workers and what they started
_WORN_OUT = 2_000  # cases after which a worker is replaced: sympy's caches only grow
# The child gets the parent's import path, so that it finds the same r3 and the user's own modules.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from r3.verify.forkserver import main; main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class CageSettings:
    """What runs in the cage, and its limits."""

    target: str  # dotted path of the function that judges
    workers: int = 2
    seconds: float = 1.0  # of processor time per case; the wall time is 30 times that
    memory_mb: int = 1024
    processes: int = 64  # that a judge may have started at a time
    sealed: bool = True  # no files, sockets or programs
    preload: bool = True  # import the target once, before forking; not for modules that start threads
    warm_up: tuple[dict[str, Any], ...] = ()  # cases judged once before the first fork

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 2:
            raise ValueError(f"seconds={self.seconds}: a case gets at most 2 s of processor time (0 < seconds <= 2)")
        if self.workers < 1 or self.memory_mb < 256:
            raise ValueError(f"workers={self.workers}, memory_mb={self.memory_mb}: at least 1 and 256 are needed")


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one case: a result, or how it failed (timeout, memory, processes, crashed, error)."""

    result: Any = None
    failed: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Task:
    case: dict[str, Any]
    future: Future[Answer] = field(default_factory=Future)
    again: bool = False  # its first try failed, maybe through no fault of its own

    def settle(self, answer: Answer) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_result(answer)


class _Failed(Exception):
    """A case that ends its worker: why, in one word, and in detail."""

    def __init__(self, failed: str, detail: str = "") -> None:
        super().__init__(failed, detail)
        self.failed, self.detail = failed, detail


class _Turns:
    """Chunks run side by side; a second try runs alone, and is not kept waiting by new chunks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._waiting = 0  # second tries

    @contextlib.contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        with self._changed:
            self._waiting += alone
            self._changed.wait_for(lambda: not self._running if alone else self._running >= 0 and not self._waiting)
            self._waiting -= alone
            self._running += -1 if alone else 1  # below zero: one runs alone
        try:
            yield
        finally:
            with self._changed:
                self._running -= -1 if alone else 1
                self._changed.notify_all()


class Cage:
    """A pool of killable workers. Any thread may submit; it ends when closed, or with its process."""

    def __init__(self, settings: CageSettings) -> None:
        self.settings = settings
        self._tasks: queue.SimpleQueue[list[_Task] | None] = queue.SimpleQueue()
        self._forkserver = _ForkServer(settings)
        self._turns = _Turns()
        self._lock = threading.Lock()
        self._closed = False
        self._keepers = [
            threading.Thread(target=self._keep, name=f"r3-verify-{i}", daemon=True) for i in range(settings.workers)
        ]
        for keeper in self._keepers:
            keeper.start()

    def submit(self, cases: Iterable[dict[str, Any]]) -> list[Future[Answer]]:
        """Futures of the cases, in order. They always end in an Answer, unless the cage itself cannot work."""
        tasks = [_Task(case) for case in cases]
        share = max(1, min(_CHUNK, -(-len(tasks) // self.settings.workers)))
        with self._lock:
            if self._closed:
                raise VerifierError("this verifier is closed; make a new one")
            for start in range(0, len(tasks), share):
                self._tasks.put(tasks[start : start + share])
        return [task.future for task in tasks]

    def close(self) -> None:
        """End every process and thread; cases still waiting are cancelled."""
        with self._lock:
            self._closed = True
        for _ in self._keepers:
            self._tasks.put(None)
        self._forkserver.close()  # ends the workers too, so that no thread waits for one
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
                with self._turns.take(alone=chunk[0].again):
                    if worker is None:
                        worker = self._forkserver.fork()
                    worker = self._run(worker, chunk)
            except Exception as error:  # noqa: BLE001 a keeper that dies would leave its callers waiting for ever
                if worker is not None:
                    with contextlib.suppress(Exception):
                        self._forkserver.reap(worker)
                worker = None
                for task in chunk:
                    with contextlib.suppress(InvalidStateError):
                        task.future.set_exception(VerifierError(f"the verifier's processes cannot run: {error}"))
        if worker is not None:
            worker.close()

    def _run(self, worker: _Worker, chunk: Sequence[_Task]) -> _Worker | None:
        """Have a worker answer a chunk; the worker, or None if it had to be ended."""
        for index, task in enumerate(chunk):
            started = time.monotonic()
            try:
                answer = self._answered(worker, task)
            except _Failed as failure:
                self._forkserver.reap(worker)
                if task.again or failure.failed == "processes":
                    task.settle(Answer(None, failure.failed, failure.detail, time.monotonic() - started))
                else:
                    task.again = True
                    self._tasks.put([task])
                for left in chunk[index + 1 :]:  # one by one, so that several hung cases spread over the workers
                    self._tasks.put([left])
                return None
            task.settle(answer)
            worker.cases = _WORN_OUT if answer.failed == "memory" else worker.cases + 1
        if worker.cases < _WORN_OUT:
            return worker
        self._forkserver.reap(worker)
        return None

    def _answered(self, worker: _Worker, task: _Task) -> Answer:
        started = time.monotonic()
        deadline = started + _PATIENCE * self.settings.seconds
        nonce = secrets.token_hex(16)
        try:
            forkserver.send(worker.channel, [nonce, task.case], deadline)
            self._wait(worker, deadline)
            reply = forkserver.receive(worker.channel, deadline, _LARGEST_REPLY)
        except TimeoutError as error:
            raise _Failed("timeout") from error
        except forkserver.Malformed as error:
            raise _Failed("error", f"the reply is not the judge's: {error}") from error
        except (EOFError, OSError) as error:
            raise _Failed("crashed") from error
        match reply:
            case {"nonce": str(given), "result": result, **rest} if given == nonce and not rest:
                answer = Answer(result, seconds=time.monotonic() - started)
            case {"nonce": str(given), "failed": "memory" | "error" as failed, **rest} if given == nonce:
                answer = Answer(None, failed, str(rest.get("detail", ""))[:500], time.monotonic() - started)
            case _:
                raise _Failed("error", "the reply is not the judge's: it does not repeat the number of its case")
        if worker.has_more():
            raise _Failed("error", "the reply is not the judge's: there is more than one")
        return answer

    def _wait(self, worker: _Worker, deadline: float) -> None:
        """Wait for a reply. TimeoutError when the case has used up its processor time or its wall time."""
        limit, before = self.settings.seconds, forkserver.cpu_seconds(worker.pid) or 0.0
        left = limit
        while not worker.is_ready(left if self.settings.sealed else min(left, _LOOK_AGAIN)):
            used = (forkserver.cpu_seconds(worker.pid) or 0.0) - before
            if used >= limit or time.monotonic() >= deadline:
                raise TimeoutError
            left = max(limit - used, 0.01)
            if not self.settings.sealed:
                started = forkserver.descendants(worker.pid)
                if len(started) > self.settings.processes < len(forkserver.living(started)):
                    raise _Failed("processes", f"more than {self.settings.processes} processes at a time")


class _Worker:
    """A worker as seen by its thread."""

    def __init__(self, pid: int, channel: socket.socket, generation: int) -> None:
        self.pid, self.channel = pid, channel
        self.generation = generation  # its fork server's
        self.cases = 0  # judged so far
        self._events = select.poll()
        self._events.register(channel, select.POLLIN)
        # Its end has to be seen at the process: something that it started may hold its side of the channel open.
        self._handle = os.pidfd_open(pid) if sys.platform == "linux" else None
        if self._handle is not None:
            self._events.register(self._handle, select.POLLIN)

    def is_ready(self, seconds: float) -> bool:
        """Whether something can be read within that time. EOFError if nothing can and the worker has ended."""
        ready = [descriptor for descriptor, _ in self._events.poll(1000 * seconds)]
        if self.channel.fileno() in ready:
            return True
        if ready:
            raise EOFError
        return False

    def has_more(self) -> bool:
        return any(descriptor == self.channel.fileno() for descriptor, _ in self._events.poll(0))

    def close(self) -> None:
        self.channel.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _ForkServer:
    """The parent's side of the fork server process: started on first use, and again if it dies."""

    def __init__(self, settings: CageSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._generation = 0
        self._closed = False
        self._mark = secrets.token_hex(16)

    def fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                pid = self._ask_for(theirs)
                generation = self._generation
            forkserver.receive(ours, time.monotonic() + _START_SECONDS)
        except VerifierError:
            ours.close()
            raise
        except (OSError, EOFError, forkserver.Malformed) as error:
            ours.close()
            raise VerifierError(
                f"a worker for {self._settings.target} did not start ({type(error).__name__}); check that it can be "
                f"imported and that {self._settings.memory_mb} MB are enough for that"
            ) from error
        return _Worker(pid, ours, generation)

    def reap(self, worker: _Worker) -> None:
        """End a worker, through its parent the fork server: only there is its pid certainly still its own."""
        worker.close()
        with self._lock:
            if self._control is None or worker.generation != self._generation:
                return  # it died with its fork server
            try:
                self._control.sendall(str(worker.pid).encode())
                forkserver.receive(self._control, time.monotonic() + _START_SECONDS)
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
                return int(forkserver.receive(control, time.monotonic() + _START_SECONDS))
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
            env={**os.environ, "OMP_NUM_THREADS": "1", forkserver.MARK: self._mark},
        )
        theirs.close()
        self._control, self._generation = ours, self._generation + 1
        s = self._settings
        forkserver.send(
            ours,
            {
                "target": s.target,
                "memory_mb": s.memory_mb,
                "sealed": s.sealed,
                "preload": s.preload,
                "warm_up": list(s.warm_up),
            },
        )
        forkserver.receive(ours, time.monotonic() + _START_SECONDS)
        return ours

    def _end(self) -> None:
        """End the fork server, its workers, and what they started."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is None:
            return
        if not self._settings.sealed:  # a sealed worker starts nothing, and dies with its parent
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SWEEP_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process = None
        if not self._settings.sealed:
            forkserver.end_marked(self._mark)
