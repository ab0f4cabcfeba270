"""A run's metrics: one line per step in `metrics.jsonl`, and to TensorBoard, and to W&B or trackio when asked for.

A line is appended whole or not at all; `disk.encode_line` says how it is written. Steps strictly increase down the
file, so going back to a checkpoint's step keeps a prefix of it, byte for byte.

A resumed run goes back to its checkpoint and logs some steps again. So that no curve is drawn twice, TensorBoard is
told to drop the steps after the checkpoint; the services, which cannot do so, are not sent a step twice (a resume is
exact, so it would have the same values).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import numbers
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from r3.errors import RunError
from r3.locks import FileLock, Locked
from r3.run.disk import AppendFile, decode_line, encode_line, open_regular, write_atomically, write_failed

if TYPE_CHECKING:
    from r3.run.directory import RunDirectory

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


SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True, slots=True)
class Label:
    """What a run is called at a tracking service."""

    project: str = "r3"
    name: str | None = None
    """None: the name of the run's directory."""
    group: str | None = None
    tags: Sequence[str] = ()


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_sinks(
    names: Sequence[str],
    directory: RunDirectory,
    *,
    label: Label | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_at: int | None = None,
) -> list[Sink]:
    """Open the named sinks, of `SINKS`. `resumed_at` is the step of the checkpoint being resumed; None: a new run."""
    unknown = [name for name in names if name not in SINKS]
    if unknown:
        raise RunError(f"{directory.path}: no metrics sink is called {unknown[0]!r}; choose among {', '.join(SINKS)}")
    sinks: list[Sink] = []
    try:
        for name in names:
            if name == "tensorboard":
                sinks.append(TensorBoardSink(directory.tensorboard_path, resumed_at=resumed_at))
            else:
                service = WandbSink if name == "wandb" else TrackioSink
                sinks.append(service(directory, label=label, config=config))
    except RunError:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in `metrics`, with those of nested mappings under `outer/inner`; texts and lists are left out.

    >>> dict(scalars({"loss": 1, "reward": {"mean": 0.5}, "note": "warm-up"}))
    {'loss': 1.0, 'reward/mean': 0.5}
    """
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
            continue
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, numbers.Real):
            yield prefix + key, float(value)


class TensorBoardSink:
    """TensorBoard event files, one per start of the run, written step by step without a thread or torch."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        load = _loader("tensorboard", "pip install tensorboard")
        self._events = load("tensorboard.compat.proto.event_pb2")
        self._summaries = load("tensorboard.compat.proto.summary_pb2")
        self._records = load("tensorboard.summary.writer.record_writer")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            number = sum("tfevents" in path.name for path in folder.iterdir())
        except OSError as error:
            raise write_failed(folder, error, "the event files' folder") from error
        self._file = AppendFile(folder / f"events.out.tfevents.{number:06d}", durable=False)
        self._write(file_version="brain.Event:2")
        if resumed_at is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=resumed_at + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [
            self._summaries.Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(metrics)
            if tag != "step"
        ]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        record = io.BytesIO()
        self._records.RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


class _Service(ABC):
    """What W&B and trackio share: one run, under an id kept in run.json, to which no step is sent twice."""

    package: str

    def __init__(
        self, directory: RunDirectory, *, label: Label | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        load = _loader(self.package, f"pip install 'r3-rl[{self.package}]'")
        self._module = load(self.package)
        self._seen = directory.reached
        ids = directory.info.get("sinks", {})
        if self.package not in ids:
            ids = {**ids, self.package: f"{directory.path.resolve().name}-{secrets.token_hex(4)}"}
            directory.update_info(sinks=ids)
        self._start(label or Label(), ids[self.package], directory.path, dict(config or {}))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._seen is None or step > self._seen:
            self._module.log({key: value for key, value in scalars(metrics) if key != "step"}, step=step)

    def close(self) -> None:
        self._module.finish()

    @abstractmethod
    def _start(self, label: Label, run: str, path: Path, config: dict[str, Any]) -> None: ...


class WandbSink(_Service):
    """Weights & Biases, the `wandb` extra. Its own settings (entity, offline mode) come from its environment."""

    package = "wandb"

    def _start(self, label: Label, run: str, path: Path, config: dict[str, Any]) -> None:
        self._module.init(
            project=label.project,
            id=run,
            name=label.name or run,
            group=label.group,
            tags=list(label.tags),
            dir=str(path),
            config=config,
            resume="allow",
        )


class TrackioSink(_Service):
    """trackio, the `trackio` extra. It knows a run by its name, and has no tags: they are in its config."""

    package = "trackio"

    def _start(self, label: Label, run: str, path: Path, config: dict[str, Any]) -> None:
        name = f"{label.name}-{run.rpartition('-')[2]}" if label.name else run
        self._module.init(project=label.project, name=name, group=label.group, config=config, resume="allow")


def _loader(package: str, fix: str) -> Any:
    """An importer of `package`'s modules that says how to get it when it is missing."""

    def load(module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != package:
                raise  # it is installed, but something it needs is not
            raise RunError(f"logging to {package} needs the package {package}: {fix}") from error

    return load
