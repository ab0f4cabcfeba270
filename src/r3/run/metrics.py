"""`metrics.jsonl`: one line per step, appended whole or not at all.

`disk.encode_line` says how a line is written. Steps strictly increase down the file, so going back to a checkpoint's
step keeps a prefix of it, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from r3.errors import RunError
from r3.locks import FileLock, Locked
from r3.run.disk import AppendFile, decode_line, encode_line, open_regular, write_atomically, write_failed

log = logging.getLogger(__name__)


class MetricsLog:
    """The only writer of a metrics file. It locks the file itself, so that removing the file `lock` does not help.

    Opening it checks every line and changes nothing; a last line that was cut off is repaired by the first write.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """`durable`: wait until each line is on the disk, so that not even a power cut loses a finished step."""
        self.path = path
        self._durable = durable
        self._file = AppendFile(path, durable=durable)
        self._lock: FileLock | None = None
        try:
            self._lock = _locked(path)
            self.last_step, self._tail = self._read_to_the_end()
        except RunError:
            self.close()
            raise

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path} already ends at step {self.last_step}; step {step} cannot follow it")
        if metrics.get("step", step) != step:
            raise ValueError(f"the metrics of step {step} carry step {metrics['step']}")
        self._repair()
        self._file.append(encode_line({**metrics, "step": step}, first="step"))
        self.last_step = step

    def rewind(self, step: int) -> int | None:
        """Drop the lines after `step`, as when its checkpoint was written. Returns the last step kept."""
        self._repair()
        last, end = None, 0
        for line in _complete_lines(self.path):
            if line.step > step:
                break
            last, end = line.step, line.end
        if self.last_step != last:
            with self.path.open("rb") as file:
                kept = file.read(end)
            self._replace(kept)
            log.info("%s: went back from step %s to step %s", self.path, self.last_step, step)
        if last != step and step > 0:
            log.warning("%s: ends at step %s, before step %d: the lines between are missing", self.path, last, step)
        self.last_step = last
        return last

    def read(self) -> Iterator[dict[str, Any]]:
        return read_metrics(self.path)

    def close(self) -> None:
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _replace(self, kept: bytes) -> None:
        """Put a new file in place of this one: readers notice that what they have read is no longer valid."""
        write_atomically(self.path, kept)
        self._file.close()  # it still points to the file that was replaced
        self._file = AppendFile(self.path, durable=self._durable)
        lock, self._lock = self._lock, _locked(self.path)
        if lock is not None:
            lock.release()

    def _read_to_the_end(self) -> tuple[int | None, bytes]:
        """The last step, and the bytes after the last complete line."""
        last, end = None, 0
        for line in _complete_lines(self.path):
            last, end = line.step, line.end
        with self.path.open("rb") as file:
            file.seek(end)
            tail = file.read()
        with contextlib.suppress(ValueError):
            last = _step(decode_line(tail))  # complete but for its newline
        return last, tail

    def _repair(self) -> None:
        """Complete or drop what follows the last complete line."""
        tail, self._tail = self._tail, b""
        if not tail:
            return
        try:
            step = _step(decode_line(tail))
        except ValueError:
            log.warning("%s: dropped the last line, cut off after %d bytes; all before is kept", self.path, len(tail))
            self._file.truncate(self.path.stat().st_size - len(tail))
            return
        log.warning("%s: the last line (step %d) had no newline; added it", self.path, step)
        self._file.append(b"\n")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of a metrics file, oldest first. Safe while it is being written: half a line is skipped."""
    for line in _complete_lines(path):
        yield line.record


def _locked(path: Path) -> FileLock:
    try:
        return FileLock(path, note=False)
    except Locked as holder:
        raise RunError(
            f"{path}: in use by {holder}, which trains in this directory though its file 'lock' is gone; stop that "
            "process first, or choose another run.dir"
        ) from holder
    except OSError as error:
        raise write_failed(path, error, "its lock") from error


class _Line(NamedTuple):
    step: int
    end: int
    """Offset in the file of the byte after the line."""
    record: dict[str, Any]


def _complete_lines(path: Path) -> Iterator[_Line]:
    last, end = None, 0
    try:
        file = open_regular(path)
    except OSError as error:
        raise RunError(f"{path}: cannot read the metrics ({error.strerror}); is it in a run directory?") from error
    with file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            end += len(raw)
            try:
                record = decode_line(raw)
                step = _step(record)
            except ValueError as error:
                raise _bad_line(path, number, str(error)) from error
            if last is not None and step <= last:
                raise _bad_line(path, number, f"step {step} comes after step {last}")
            last = step
            yield _Line(step, end, record)


def _step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    if type(step) is not int:
        raise ValueError("it has no whole-number 'step'")
    return step


def _bad_line(path: Path, number: int, reason: str) -> RunError:
    return RunError(
        f"{path}, line {number}: damaged ({reason}); nothing was changed: restore the file from a backup, or delete "
        "that line by hand: metrics are for looking at, the run does not need them all"
    )
