"""Running the cells: each is an `r3 train` in its own process, several side by side, resumed if it was stopped.

Separate processes, because a cell that dies (of memory, of a diverged policy) must not take the others with it, and
because a small model leaves most of a card idle.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from r3.compare.plan import Plan, Variant
from r3.compare.records import Record, record_of, record_path, write_record
from r3.errors import RunError
from r3.locks import FileLock, Locked
from r3.run import RunFiles, StopRequested, read_metrics

Say = Callable[[str], None]
POLL = 0.2
"""Seconds between two checks of the running cells, which take minutes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant with a seed, and where it runs."""

    variant: Variant
    seed: int
    directory: Path

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    def __str__(self) -> str:
        return f"{self.variant.name} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the cells ended."""

    failed: list[Cell]
    stopped_by: str | None


def cells_of(plan: Plan, out: Path) -> list[Cell]:
    return [
        Cell(variant, seed, out / "cells" / variant.name / f"seed-{seed}")  # one run directory each
        for variant, seed in plan.cells
    ]


def run_cells(plan: Plan, out: Path, *, jobs: int, keep: bool, say: Say) -> Outcome:
    """Run all unfinished cells, `jobs` at a time; a failed cell is reported and the others go on. Call it in `held`."""
    every = cells_of(plan, out)
    waiting = [cell for cell in every if not record_path(out, cell.variant.name, cell.seed).exists()]
    if len(waiting) < len(every):
        say(f"{len(every) - len(waiting)} of {len(every)} cells are finished already")
    running: list[tuple[Cell, subprocess.Popen[bytes]]] = []
    failed: list[Cell] = []
    asked = False
    with StopRequested() as stop:
        try:
            while running or (waiting and not stop):
                while waiting and len(running) < jobs and not stop:
                    cell = waiting.pop(0)
                    if _is_over(plan, cell):  # we were killed before its numbers were stored
                        _finish(plan, out, cell, 0, keep=keep, say=say)
                    else:
                        running.append((cell, _start(plan, cell)))
                if stop and not asked:  # once: a second signal would end a cell at once
                    asked = True
                    for _, process in running:
                        process.terminate()
                time.sleep(POLL)
                for cell, process in [pair for pair in running if pair[1].poll() is not None]:
                    running.remove((cell, process))
                    if not _finish(plan, out, cell, process.returncode, keep=keep, say=say) and not stop:
                        failed.append(cell)
        finally:
            for _, process in running:  # some are left only after a second Ctrl-C or a bug
                process.kill()
    return Outcome(failed, stop.name)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold the lock of a comparison's directory."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / "lock")
    except Locked as holder:
        raise RunError(f"{out}: in use by {holder}; stop that process first, or choose another --out") from holder
    try:
        yield
    finally:
        lock.release()


def _is_over(plan: Plan, cell: Cell) -> bool:
    """Whether the cell's run has spent its tokens; its last line carries the last evaluation."""
    path = RunFiles(cell.directory).metrics_path
    return path.exists() and sum(line.get("tokens/generated", 0) for line in read_metrics(path)) >= plan.tokens


def _start(plan: Plan, cell: Cell) -> subprocess.Popen[bytes]:
    """The cell as a subprocess, resumed if it was begun; its output goes to a log beside its directory."""
    begun = RunFiles(cell.directory).info_path.exists()
    recipe = [] if plan.recipe is None else [plan.recipe]
    settings = plan.settings(cell.variant, cell.seed, cell.directory)
    arguments = ["--resume", str(cell.directory)] if begun else [*recipe, *settings]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with cell.log.open("ab") as log:
        return _launch([sys.executable, "-m", "r3", "train", "--quiet", *arguments], log)


def _launch(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # In its own session: Ctrl-C reaches only us, and we ask each cell once to finish its step.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the cell write a checkpoint and end if this process is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _finish(plan: Plan, out: Path, cell: Cell, code: int, *, keep: bool, say: Say) -> bool:
    """Store a finished cell's numbers; report a cell that did not finish."""
    if code != 0:
        say(f"{cell}: ended with exit code {code}; the same command goes on with it. {_last_line(cell.log)}")
        return False
    command = plan.command(cell.variant, cell.seed)
    try:
        record = record_of(
            cell.directory, variant=cell.variant.name, seed=cell.seed, command=command, tokens=plan.tokens
        )
    except RunError as error:  # its numbers cannot be read; those of the others can
        say(f"{cell}: {error}")
        return False
    write_record(record, out)
    if not keep:
        _slim(cell.directory)
    say(_told(record))
    return True


def _slim(directory: Path) -> None:
    """Remove checkpoints, buffer and rollouts: gigabytes that only a resume or a closer look needs."""
    files = RunFiles(directory)
    for folder in (files.checkpoints.folder, files.rollouts.folder):
        shutil.rmtree(folder, ignore_errors=True)
    for path in directory.glob(f"{files.buffer_path.name}*"):
        path.unlink(missing_ok=True)


def _told(record: Record) -> str:
    first, last = record.evaluations[0], record.evaluations[-1]
    return (
        f"{record.variant} seed {record.seed}: {record.totals['tokens/generated']:,.0f} tokens in "
        f"{record.totals['steps']:.0f} steps, {record.totals['seconds/step']:.0f} s; held-out pass@1 "
        f"{first['pass@1']:.1%} → {last['pass@1']:.1%}"
    )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{log}: {lines[-1].strip()}" if lines else f"{log} is empty"
