"""Where metrics go besides `metrics.jsonl`: TensorBoard, and W&B or trackio when asked for.

A resumed run goes back to its checkpoint and logs some steps again. So that no curve is drawn twice, TensorBoard is
told to drop the steps after the checkpoint; the services, which cannot do so, are not sent a step twice (a resume is
exact, so it would have the same values).
"""

from __future__ import annotations

import importlib
import io
import numbers
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from r3.errors import RunError
from r3.run.directory import RunDirectory
from r3.run.disk import AppendFile, write_failed

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
