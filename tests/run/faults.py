"""Real faults for the run directory's tests: a small disk, and a tiny run that is killed at any file operation."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.run import RunDirectory, RunFiles

LIMIT = 128 * 1024


def python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python process of our own, with text pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], text=True, **(pipes | options))


@dataclass
class SmallDisk:
    path: Path
    tmpfs: bool

    @contextlib.contextmanager
    def full_at_limit(self) -> Iterator[None]:
        """Inside, no more than `LIMIT` bytes go anywhere: the disk's size, or else the size of any one file."""
        if self.tmpfs:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(path: Path, *, tmpfs: bool) -> Iterator[SmallDisk]:
    """A file system of its own where we may mount one, else a limit on the size of files."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={LIMIT}", "none", str(path)]
    mounted = tmpfs and os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def train(path: Path, total: int) -> None:
    """A run that starts or resumes in `path`; each step's numbers depend on all steps before it."""
    exists = RunFiles(path).info_path.exists()
    directory = RunDirectory.open(path) if exists else RunDirectory.create(path, "model: tiny\n", seed=1)
    with directory:
        checkpoint = directory.checkpoints.latest()
        step = checkpoint.step if checkpoint else 0
        state = json.loads((checkpoint.path / "deep" / "state.json").read_bytes()) if checkpoint else 1
        if exists:
            directory.rewind(step)
            directory.checkpoints.prune(1)  # the killed run may not have come to it
        while step < total:
            step, state = step + 1, state * 48271 % 2147483647
            directory.rollouts.write(step, [{"text": "x" * (state % 7), "reward": state / 2**31}])
            directory.metrics.append(step, {"reward": state / 2**31, "missing": float("nan")})
            if step % 2 == 0:
                directory.checkpoints.write(step, lambda folder, state=state: save(folder, state))
                directory.checkpoints.prune(1)


def save(folder: Path, state: int) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "state.json").write_text(json.dumps(state))
    (folder / "weights").write_bytes(state.to_bytes(8, "big") * 100)


def die_at(operation: int) -> None:
    """SIGKILL this process at its `operation`-th change to the file system: before it, or half-way through a write."""
    counter = itertools.count(1)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if next(counter) == operation:
                if function is real_write:
                    function(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    real_write = os.write
    for name in ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate"):
        setattr(os, name, wrap(getattr(os, name)))


def attempt(path: Path, total: int, operation: int | None) -> bool:
    """Run `train` in a child that dies at `operation`; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        os.fsync = lambda fd: None  # a killed process, unlike a power cut, loses nothing it has written
        if operation is not None:
            die_at(operation)
        train(path, total)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert status == 0, f"the run in {path} failed"
    return True


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a run but those that tell of its resumes."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in ("run.json", "lock"))
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def kill_everywhere(root: Path, total: int) -> int:
    """Kill a run once at each of its operations in turn and resume it; returns the number of operations."""
    attempt(root / "whole", total, None)
    for operation in itertools.count(1):
        path = root / f"killed-{operation}"
        if attempt(path, total, operation):
            return operation - 1
        assert attempt(path, total, None)
        assert contents(path) == contents(root / "whole"), f"killed at operation {operation}, resumed differently"
    raise AssertionError("unreachable")


def kill_often(root: Path, total: int, seed: int) -> int:
    """Kill one run again and again at random operations, also of its resumes; returns how often it was killed."""
    attempt(root / "whole", total, None)
    chance = random.Random(seed)
    kills = 0
    while not attempt(root / "killed", total, chance.randint(1, 150)):
        kills += 1
    assert contents(root / "killed") == contents(root / "whole"), f"killed {kills} times, resumed differently"
    return kills


if __name__ == "__main__":
    experiment = {"everywhere": kill_everywhere, "often": kill_often}[sys.argv[1]]
    print(experiment(Path(sys.argv[2]), *map(int, sys.argv[3:])))
