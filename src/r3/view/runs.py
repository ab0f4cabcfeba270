"""A run as the viewer sees it: everything of it that can be read, and what is wrong with the rest.

`MetricsTail` has `metrics.jsonl` as columns; after the first read, it reads new lines only.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from r3.errors import R3Error, RunError, ViewError
from r3.run import RunFiles
from r3.run.disk import decode_line, open_regular, read_regular
from r3.view.queries import QueryIndex
from r3.view.steps import StepTables

PEAK_FRACTION = 0.2
"""SERR's p, if the run's config has none."""
_QUIET = 0.2
"""Seconds without a question before indexing goes on."""
MOST = 32
"""Most runs shown together: each needs a colour and an index in memory."""
_TRACES = ("run.json", "metrics.jsonl", "rollouts", "buffer.sqlite", "config.yaml")


class ViewedRun:
    """One run directory, opened for looking at. Missing and damaged files become `problems`."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.files = RunFiles(path)
        self.metrics = MetricsTail(self.files.metrics_path)
        self.tables = StepTables(self.files.rollouts)
        self.queries = QueryIndex(self.tables)
        self._config: dict[str, Any] | None = None

    def refresh(self) -> None:
        """Read what was written since."""
        self.metrics.refresh()

    def info(self) -> tuple[dict[str, Any], str | None]:
        """The content of run.json, even in a format that this version cannot resume; and what is wrong with it."""
        try:
            return self.files.read_info(), None
        except RunError as error:
            try:
                info = json.loads(read_regular(self.files.info_path))
            except (OSError, ValueError):
                info = {}
            return (info if isinstance(info, dict) else {}), str(error)

    def config(self) -> dict[str, Any]:
        """The settings; empty where they cannot be read."""
        if self._config is None:
            from r3.config_text import load_yaml

            try:
                loaded = load_yaml(self.files.read_config(), str(self.files.config_path))
            except R3Error:
                loaded = None
            self._config = loaded if isinstance(loaded, dict) else {}
        return self._config

    def setting(self, dotted: str, default: Any = None) -> Any:
        """One setting of the run, e.g. `method.ranking.peak_fraction`."""
        value: Any = self.config()
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def status(self) -> str:
        """'running', 'finished', 'stopped', 'ended' (its planned length is unknown) or 'empty'.

        Read from the lock's note and the steps, without touching the lock.
        """
        if _holder_lives(self.files.lock_path):
            return "running"
        if not self.metrics.steps or self.metrics.steps[-1] == 0:
            return "empty"
        planned = self.planned_steps()
        if planned is None:
            return "ended"
        return "stopped" if self.metrics.steps[-1] < planned else "finished"

    def planned_steps(self) -> int | None:
        """The planned number of steps, if the run recorded it."""
        for planned in (self.info()[0].get("total_steps"), self.setting("train.steps")):
            if isinstance(planned, int):
                return planned
        return None

    def problems(self) -> list[str]:
        """What a person should know before believing the charts."""
        problems = [self.info()[1], self.metrics.problem, *list(self.queries.problems.values())[:3]]
        return [problem for problem in problems if problem]

    def state(self) -> dict[str, Any]:
        """What changes while a run goes on. Cheap enough to be asked every second."""
        self.refresh()
        steps = self.tables.steps()
        return {
            "status": self.status(),
            "generation": self.metrics.generation,
            "lines": len(self.metrics.steps),
            "step": self.metrics.steps[-1] if self.metrics.steps else None,
            "planned": self.planned_steps(),
            "saved": [len(steps), steps[0] if steps else None, steps[-1] if steps else None],
            "indexed": self.queries.indexed,
            "problems": self.problems(),
        }

    def about(self) -> dict[str, Any]:
        """What does not change: name, settings, versions."""
        info, _ = self.info()
        return {
            "name": self.name,
            "path": str(self.path),
            "created": info.get("created"),
            "seed": info.get("seed"),
            "versions": info.get("versions", {}),
            "method": self.setting("method.name"),
            "model": self.setting("model.path"),
            "task": self.setting("task.name"),
            "peak_fraction": self.setting("method.ranking.peak_fraction", PEAK_FRACTION),
            "max_reward": self.setting("method.ranking.max_reward"),
            "group_size": self.setting("rollout.group_size"),
            "clip_low": self.setting("method.objective.clip_low"),
            "clip_high": self.setting("method.objective.clip_high"),
        }


def open_runs(paths: Sequence[str | Path]) -> list[ViewedRun]:
    """The runs, under distinct names; `ViewError` for a path without a run."""
    folders = [folder for path in paths for folder in runs_in(Path(path))]
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "no such directory"
            raise ViewError(f"{folder}: {what}; give the run.dir of a run, e.g. runs/r3-arithmetic-0")
        if not holds_a_run(folder):
            raise ViewError(
                f"{folder}: not a run directory (it has no run.json), nor has it runs inside; give a run.dir"
            )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [ViewedRun(folder, name) for folder, name in zip(folders, names, strict=True)]


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it and in its subfolders, by name."""
    if not folder.is_dir() or holds_a_run(folder):
        return [folder]
    inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    runs = [run for entry in inside for run in ([entry] if holds_a_run(entry) else _runs_below(entry))]
    if len(runs) > MOST:
        raise ViewError(f"{folder}: holds {len(runs)} runs, and {MOST} can be looked at together; name some of them")
    return runs or [folder]


def _runs_below(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and holds_a_run(entry))
    except OSError:  # no permission
        return []


def holds_a_run(folder: Path) -> bool:
    """Whether the folder has any file of a run."""
    return any((folder / name).exists() for name in _TRACES)


class Indexer(threading.Thread):
    """A thread that extends the query indexes while no page is being served."""

    def __init__(self, runs: Sequence[ViewedRun], asked: Callable[[], float], every: float = 2.0) -> None:
        """`asked` says when a page last asked something, by the monotonic clock."""
        super().__init__(name="r3-view-index", daemon=True)
        self._runs, self._asked, self._every = runs, asked, every
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            more = [run.queries.refresh(most=2) for run in self._runs]
            if not any(more):
                self._ended.wait(self._every)
            while time.monotonic() - self._asked() < _QUIET and not self._ended.wait(_QUIET / 4):
                pass  # pages come first

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=10)


def _holder_lives(lock: Path) -> bool:
    """Whether the process named in a lock file is alive; a note from another host is believed for a week.

    Reading the note, unlike trying the lock, cannot disturb a run that is just starting.
    """
    try:
        note = read_regular(lock, 4096).decode("utf-8", "replace")
    except OSError:
        return False
    match = re.fullmatch(r"process (\d+) on (.*)\n?", note)
    if not match:
        return False
    if match[2] != socket.gethostname():
        return time.time() - lock.stat().st_mtime < 7 * 86_400
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


Column = list[float | None]


class MetricsTail:
    """The columns so far. `generation` changes when what was read before no longer holds (a run that went back)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.problem: str | None = None
        self.steps: list[int] = []
        self.columns: dict[str, Column] = {}
        self._turn = threading.Lock()
        self._file: tuple[int, int] = (0, 0)
        self._end = 0

    def refresh(self) -> None:
        """Read the lines that were added since."""
        with self._turn:
            try:
                status = os.stat(self.path)
            except FileNotFoundError:
                self._reset("there is no metrics.jsonl yet" if self.path.parent.is_dir() else "the run is gone")
                return
            except OSError as error:
                self._reset(f"metrics.jsonl cannot be read ({error.strerror})")
                return
            # A run that goes back puts a new file in place; a shorter one under the same number was cut by hand.
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._end:
                self._reset(None)
                self._file = (status.st_dev, status.st_ino)
            try:
                if status.st_size > self._end or not stat.S_ISREG(status.st_mode):
                    self._read()
            except OSError as error:
                self._reset(f"metrics.jsonl cannot be read ({error.strerror})")

    def since(self, line: int, keep: tuple[str, ...]) -> dict[str, Any]:
        """The lines from number `line` on, as columns of the keys that start with one of `keep`."""
        with self._turn:
            return {
                "generation": self.generation,
                "from": line,
                "steps": self.steps[line:],
                "columns": {key: values[line:] for key, values in self.columns.items() if key.startswith(keep)},
            }

    def last(self, key: str) -> float | None:
        """The newest value of a column."""
        column = self.columns.get(key)
        return column[-1] if column else None

    def _reset(self, problem: str | None) -> None:
        if self.steps or self._end:
            self.generation += 1
        self.problem, self.steps, self.columns = problem, [], {}
        self._file, self._end = (0, 0), 0

    def _read(self) -> None:
        with open_regular(self.path) as file:
            file.seek(self._end)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # half a line is left for later
        for raw in whole.splitlines(keepends=True):
            try:
                self._take(decode_line(raw))
                self._end += len(raw)
            except ValueError as error:
                self.problem = f"metrics.jsonl is damaged after step {self.steps[-1] if self.steps else 0} ({error})"
                return

    def _take(self, record: dict[str, Any]) -> None:
        step = record.pop("step", None)
        if type(step) is not int or (self.steps and step <= self.steps[-1]):
            raise ValueError(f"a line of step {step} follows step {self.steps[-1] if self.steps else 0}")
        for key, value in record.items():
            if not isinstance(value, list):  # lists (results by held-out problem) are no curves
                self.columns.setdefault(key, [None] * len(self.steps))
        for key, column in self.columns.items():
            column.append(_short(record.get(key)))
        self.steps.append(step)
        self.problem = None


def _short(value: Any) -> float | None:
    """A number with five digits, enough for a chart; None for anything missing or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
