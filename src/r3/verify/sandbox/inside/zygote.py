"""The process that every verdict's processes are forked from: warm, behind its walls, and holding nothing.

A launcher enters the namespaces and starts the zygote, which in its PID namespace is process 1: all others end with it.
For each verdict the zygote gets a socket and forks the answers' processes and the tests'. The job, tests included,
comes through that socket to the tests' process alone, after the answers' processes were forked: so they cannot hold it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import answer, linux, messages, remote, tester, walls

# What answers import, loaded before the walls go up: also extension modules whose libraries lie outside Python's.
_WARM = (
    "abc", "argparse", "array", "ast", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "collections",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools",
    "gc", "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache", "locale", "lzma", "math", "numbers",
    "operator", "pprint", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "time",
    "timeit", "traceback", "types", "typing", "unicodedata", "uuid", "zlib",
)  # fmt: skip
_THREAD_LIBRARY = "libgcc_s.so.1"  # glibc loads it when a thread is cancelled, and ends the process without it
_GRACE = 1.0  # seconds for a tests' process beyond what the answer may take
_LARGEST_INPUT_KB = 65_536
_FILES, _TESTS_FILES = 64, 256  # open at once


def main(control: int, host: int, mode: str, settings: str) -> None:
    """The launcher: enter the namespaces, start the zygote, and end with it or with the process that asked for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the host decides what it means
    limits = json.loads(settings)
    channel = socket.socket(fileno=control)
    try:
        parent = os.pidfd_open(host)
        if os.getppid() != host:
            return
        for name in _WARM:
            with contextlib.suppress(ImportError):  # a Python built without it
                importlib.import_module(name)
        with contextlib.suppress(OSError):
            ctypes.CDLL(_THREAD_LIBRARY)
        user, namespaces = walls.unused_user(), walls.enter_namespaces(mode)
    except OSError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        return
    launcher = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        os.close(parent)
        _zygote(channel, launcher, mode, user, limits, namespaces)
    channel.close()
    child = os.pidfd_open(zygote)
    ended = select.select([parent, child], [], [])[0]
    if parent in ended:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.waitpid(zygote, 0)


def _zygote(
    channel: socket.socket, launcher: int, mode: str, user: int, limits: dict[str, Any], namespaces: str
) -> NoReturn:
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() not in (launcher, 0):  # 0 is a parent outside the namespace
            os._exit(1)
        zygote = Zygote(mode, user, limits)
        channel.send(json.dumps(zygote.wall_up(namespaces)).encode())
        gc.collect()
        gc.freeze()
        while True:
            message, handles, _, _ = socket.recv_fds(channel, 256, 1)
            if not handles:
                os._exit(0)
            zygote.serve(handles[0], **json.loads(message))
            channel.send(b"{}")
    except Exception as error:  # noqa: BLE001 whatever it is, the host should say it
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


class Zygote:
    def __init__(self, mode: str, user: int, limits: dict[str, Any]) -> None:
        self.mode, self.user, self.limits = mode, user, limits
        self.rules: int | None = None
        self.children: set[int] = set()

    def wall_up(self, namespaces: str) -> dict[str, Any]:
        """Put up the walls that all share and try them out. Returns a description for the host."""
        built = [namespaces] if namespaces else []
        if namespaces:
            built.append(walls.build_root(self.limits["scratch_mb"]))
        elif self.mode == "none":
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self.rules = walls.landlock_rules(self.mode)
        if self.rules is not None:
            built.append(f"Landlock (version {walls.landlock_version()})")
        if self.mode != "none":
            if not linux.calls_can_be_restricted():
                raise OSError("seccomp: no list of system calls for this processor")
            built.append("seccomp")
            if done := self._probed():
                raise OSError(f"a confined process could still {', '.join(done)}")
        return {"layers": [*built, "limits"]}

    def _probed(self) -> list[str]:
        ours, theirs = os.pipe()

        def attempt() -> None:
            self._confine(self.user)
            messages.send(theirs, walls.probe(self.limits["outside"]))

        self._fork(attempt)
        os.close(theirs)
        try:
            done: list[str] = messages.receive(ours)
        finally:
            os.close(ours)
            self._end_all()
        return done

    def serve(self, job: int, runs: int) -> None:
        """Fork the processes of one verdict, wait for the tests' one, end them all."""
        ends = []
        for number in range(runs):
            ours, theirs = socket.socketpair()
            stdin, output = os.memfd_create("stdin"), os.memfd_create("output")
            room = str(number) if runs > 1 else "."
            pid = self._fork(partial(self._answer, theirs.fileno(), stdin, output, room))
            theirs.close()
            ends.append(remote.Run(pid, ours.detach(), stdin, output))
        judge = self._fork(lambda: self._tests(job, ends))
        for handle in (job, *(handle for end in ends for handle in end[1:])):
            os.close(handle)
        ended = os.pidfd_open(judge)
        select.select([ended], [], [], self.limits["seconds"] * remote.WALL * runs + _GRACE)
        os.close(ended)
        self._end_all()
        if self.mode in ("root", "user"):
            walls.empty_scratch(self.limits["scratch_mb"])

    def _answer(self, channel: int, stdin: int, output: int, room: str) -> None:
        self._confine(self.user)
        with contextlib.suppress(OSError):  # without namespaces there is no directory to write in
            os.makedirs(room, exist_ok=True)
            os.chdir(room)
        answer.become(channel, stdin, output)
        answer.serve(3)

    def _tests(self, job: int, ends: list[remote.Run]) -> None:
        limits = self.limits
        seconds = limits["seconds"] * remote.WALL * len(ends) + _GRACE
        self._confine(self.user + 1, seconds, _LARGEST_INPUT_KB, _TESTS_FILES)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # nobody reads what a test prints
        os.dup2(nowhere, 2)
        messages.send(job, tester.judge(messages.receive(job), ends, limits["seconds"], limits["output_kb"] * 1024))

    def _confine(
        self, user: int, seconds: float | None = None, file_kb: int | None = None, files: int = _FILES
    ) -> None:
        limits = self.limits
        walls.change_user(self.mode, user)
        if os.getpid() != 1:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has the kernel forget it
        walls.confine(
            self.mode,
            self.rules,
            seconds=seconds or limits["seconds"],
            memory_mb=limits["memory_mb"],
            file_kb=file_kb or limits["output_kb"],
            files=files,
        )

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            self.children.add(pid)
            return pid
        try:
            work()
        finally:
            os._exit(0)

    def _end_all(self) -> None:
        """End and reap every process of a verdict."""
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # everyone in this namespace but this process
        else:
            for pid in self.children:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so still the one that was forked
        for pid in self.children:
            os.waitpid(pid, 0)
        self.children.clear()
        if self.mode == "none":
            _end_orphans()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _end_orphans() -> None:
    """What answers without walls have started, which has become this process's children."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
