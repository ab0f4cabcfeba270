"""`metrics.jsonl` as columns; after the first read, only new lines are read."""

from __future__ import annotations

import math
import os
import stat
import threading
from pathlib import Path
from typing import Any

from r3.run.disk import open_regular
from r3.run.jsonl import decode_line

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
