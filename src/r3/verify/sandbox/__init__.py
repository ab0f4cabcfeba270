"""Code of unknown origin, run against tests behind walls (docs/code.md).

This is the host's side: workers that judge code, started on first use, one verdict at a time each, replaced when they
fail. What happens behind the walls is in `inside`.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r3.verify.judge import VerifierError
from r3.verify.sandbox.inside import messages
from r3.verify.sandbox.inside.remote import WALL

__all__ = ["Job", "Outcome", "Sandbox", "SandboxSettings", "Walls"]

Walls = Literal["auto", "namespaces", "landlock", "none"]
_MODES = {"auto": ("root", "user", "landlock"), "namespaces": ("root", "user"), "landlock": ("landlock",)}
_START_SECONDS = 60.0
_GRACE = 5.0  # beyond what the zygote allows a verdict: only a worker that is stuck takes that
_MOST_RUNS = 24  # programs in one go: each has a process waiting
# The inner side is loaded by itself: a worker has none of r3 in it, and none of its dependencies.
_BOOT = """
import sys, types
for name, folder in zip(("r3", "r3.verify", "r3.verify.sandbox"), sys.argv[5:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from r3.verify.sandbox.inside.zygote import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
"""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """What walls to ask for, and what one run of an answer may take."""

    walls: Walls = "auto"
    workers: int = 2
    seconds: float = 5.0
    """CPU time for an answer and all its tests, or for one run of a program; three times as much by the clock."""
    memory_mb: int = 512
    output_kb: int = 1024
    """What an answer may print, and the largest file it may write."""
    scratch_mb: int = 16

    def __post_init__(self) -> None:
        if self.walls not in (*_MODES, "none"):
            raise ValueError(f"sandbox={self.walls!r}: give one of auto, namespaces, landlock, none")
        if self.workers < 1 or self.seconds <= 0:
            raise ValueError(f"workers={self.workers}, seconds={self.seconds}: give at least 1, and more than 0")
        if self.memory_mb < 128 or self.output_kb < 1 or self.scratch_mb < 1:
            raise ValueError(
                f"memory_mb={self.memory_mb}, output_kb={self.output_kb}, scratch_mb={self.scratch_mb}: at least 128, "
                "1 and 1 are needed"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """Code to judge, and what by."""

    code: str
    tests: Sequence[str] | Sequence[tuple[str, str]]
    """Python that must run without an exception, or pairs of a program's input and the output that it must have."""
    setup: str = ""
    preamble: str = ""
    """Source that the answer may build on, such as a signature to complete; trusted, like the tests."""
    entry_point: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many tests passed, and why not all did: as one word to count, and as text."""

    passed: int
    total: int
    reason: str
    feedback: str = ""


class Sandbox:
    """A pool of workers. Any thread may ask; close it to leave no process behind."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.settings.workers):
            self._idle.put(None)
        self._mode = ""
        self._layers: list[str] = []
        self._closed = False

    def start(self) -> list[str]:
        """Start a worker. Returns its walls; VerifierError if the machine offers none, unless none were asked for."""
        worker = self._idle.get()
        try:
            worker = worker or self._started()
        finally:
            self._idle.put(worker)
        return list(self._layers)

    def judge(self, job: Job, *, graded: bool = False) -> Outcome:
        """Run a job's tests: until one fails or, graded, all of them."""
        batches = [job.tests]
        if _of_programs(job):
            batches = [job.tests[start : start + _MOST_RUNS] for start in range(0, len(job.tests), _MOST_RUNS)]
        passed, first = 0, None
        for batch in batches:
            outcome = self._judge(job, batch, graded)
            passed += outcome.passed
            if outcome.reason != "pass":
                first = first or outcome
                if not graded:
                    break
        return Outcome(passed, len(job.tests), first.reason if first else "pass", first.feedback if first else "")

    def close(self) -> None:
        """End every worker. Waits for verdicts under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in range(self.settings.workers):
            if (worker := self._idle.get()) is not None:
                worker.close()
        self._idle.put(None)  # later callers get the error that it is closed

    def _judge(self, job: Job, tests: Sequence[Any], graded: bool) -> Outcome:
        programs = _of_programs(job)
        message = {
            "code": job.code,
            "tests": list(tests),
            "setup": job.setup,
            "preamble": job.preamble,
            "entry_point": job.entry_point,
            "programs": programs,
            "graded": graded,
        }
        runs = len(tests) if programs else 1
        for _ in range(2):  # a worker may have died of something else: the case gets another
            worker = self._idle.get()
            try:
                worker = worker or self._started()
                reply = worker.ask(message, runs)
            except _Broken:
                if worker is not None:
                    worker.close()
                worker = None
                continue
            finally:
                self._idle.put(worker)
            if reply is None:  # the tests' process was ended: only tests that run on by themselves do that
                return Outcome(0, len(tests), "timeout", "The tests took too long.")
            return Outcome(int(reply["passed"]), len(tests), str(reply["reason"]), str(reply["feedback"]))
        return Outcome(0, len(tests), "crashed", "The answer ended the process that runs it.")

    def _started(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise VerifierError("this sandbox is closed; make a new one")
            walls = self.settings.walls
            if self._mode:
                modes: tuple[str, ...] = (self._mode,)
            else:
                modes = ("none",) if walls == "none" else _MODES[walls]
            problems = []
            for mode in modes:
                try:
                    worker = _Worker(mode, self.settings)
                except _Broken as broken:
                    problems.append(f"{mode}: {broken}")
                    continue
                self._mode, self._layers = mode, worker.layers
                return worker
        raise VerifierError(
            f"cannot isolate answers' code on this machine ({'; '.join(problems)}); allow unprivileged user namespaces "
            "or use Linux 6.2 or later with Landlock, or set task.sandbox=none to run it unguarded"
        )


class _Broken(Exception):
    """A worker that cannot start or go on."""


class _Worker:
    """The host's side of one zygote."""

    def __init__(self, mode: str, settings: SandboxSettings) -> None:
        self._settings = settings
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = {
            "seconds": settings.seconds,
            "memory_mb": settings.memory_mb,
            "output_kb": settings.output_kb,
            "scratch_mb": settings.scratch_mb,
            "outside": sorted({str(Path.home()), os.getcwd()} - {"/"}),
        }
        folders = [_FOLDER.parent.parent, _FOLDER.parent, _FOLDER]
        numbers = [str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", _BOOT, *numbers, mode, json.dumps(limits), *map(str, folders)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "HOME": "/"},
                cwd="/",
                start_new_session=True,
            )
        try:
            self.layers: list[str] = self._heard(_START_SECONDS)["layers"]
        except _Broken:
            self.close()
            raise

    def ask(self, message: dict[str, Any], runs: int) -> dict[str, Any] | None:
        """What the tests' process says of a job; None if it was ended before it said anything."""
        limit = self._settings.seconds * WALL * runs + _GRACE
        ours, theirs = socket.socketpair()
        try:
            with ours, theirs:
                socket.send_fds(self._control, [json.dumps({"runs": runs}).encode()], [theirs.fileno()])
                theirs.close()
                reply = _exchanged(ours, message, time.monotonic() + limit)
        except OSError as error:
            raise _Broken(str(error)) from error
        self._heard(limit)
        return reply

    def close(self) -> None:
        """End the zygote, and with it all of its processes; wait until they are gone."""
        self._control.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _heard(self, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        try:
            data = self._control.recv(65_536)
        except OSError as error:
            raise _Broken(str(error) or "no sign of life") from error
        message: dict[str, Any] = json.loads(data) if data else {"error": "it ended"}
        if "error" in message:
            raise _Broken(message["error"])
        return message


def _exchanged(channel: socket.socket, message: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    try:
        messages.send(channel.fileno(), message)
        reply = messages.receive(channel.fileno(), messages.until(deadline))
    except (EOFError, TimeoutError, BrokenPipeError, ConnectionResetError):
        return None
    return reply if isinstance(reply, dict) else None


def _of_programs(job: Job) -> bool:
    return bool(job.tests) and not isinstance(job.tests[0], str)
