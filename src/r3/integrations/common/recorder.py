"""A run directory for `r3 view` of a run in another trainer, inside the trainer's output folder.

It has the method's metrics, the rollouts with what R³ did to each group, and the settings. Weights and checkpoints stay
with the trainer.

The buffer is one live file, held by one process, with a full copy in every checkpoint (`save_buffer`): so a checkpoint
can be moved, and resumed with any number of processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from r3.buffer import SampleBuffer
from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings
from r3.policy.update import UpdateReport
from r3.run import RunDirectory, RunFiles
from r3.train.record import StepNotes, group_summaries, rollout_rows
from r3.train.step_metrics import ranking_metrics, step_metrics

log = logging.getLogger(__name__)
FOLDER = "r3_run"
OF_THE_TRAINER = ("update/", "tokens/trained", "memory/")
"""Metrics of r3's own loop that other trainers do not report, or report differently."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a run is made of, for its record."""

    method: MethodSettings
    settings: Mapping[str, Any]
    """Settings by section, for config.yaml; under r3's names where r3 has such a section."""
    defaults: Mapping[str, Any]
    """Defaults of the trainer's own section."""
    versions: Mapping[str, str]
    limit: int
    """Most tokens of an answer."""
    total_steps: int
    seed: int
    rollouts_every: int
    rollouts_groups: int


@dataclass(slots=True)
class _Step:
    number: int
    started: float
    results: list[StepResult] = field(default_factory=list)
    reflections: Counter[str] = field(default_factory=Counter)
    shown: StepNotes = field(default_factory=StepNotes)
    more: dict[str, float] = field(default_factory=dict)


class RunRecorder:
    """Writes a step's line and rollouts when the next step begins, since trainers report its loss only at its end."""

    def __init__(self, home: str, run: Described, tokenizer: Any, buffer: SampleBuffer, *, after: int | None) -> None:
        """`after`: the step whose checkpoint is resumed; None for a new run."""
        self._run, self._tokenizer, self._buffer = run, tokenizer, buffer
        self._step: _Step | None = None
        self._directory = _opened(Path(home) / FOLDER, run, after)
        self._directory.update_info(
            total_steps=run.total_steps,
            defaults=_plain(run.defaults),
            versions={**self._directory.info["versions"], **run.versions},
        )
        _link(self._directory.buffer_path, buffer)

    def begin(self, step: int) -> None:
        """A batch of that step is about to be generated. A step may have several."""
        if self._step is None or self._step.number != step:
            self.flush()
            self._step = _Step(step, time.perf_counter())

    def took(self, result: StepResult, reflections: Mapping[str, int], **more: float) -> None:
        """Take what the method decided about the batch."""
        assert self._step is not None, "begin comes first"
        of_step = self._step
        of_step.results.append(result)
        of_step.reflections.update(reflections)
        of_step.more |= more
        kept = result.groups[: self._run.rollouts_groups]
        shown = {mixed.group.context.shown for mixed in kept} - {None}
        attempts = self._buffer.find(number for number in shown if number is not None)
        of_step.shown = StepNotes(shown={**of_step.shown.shown, **attempts})

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the trainer's metrics of a step, under r3's names."""
        if self._step is not None and self._step.number == step:
            self._step.more |= metrics

    def flush(self) -> None:
        """Write the current step: before a checkpoint, before the next step, and when training ends."""
        of_step, self._step = self._step, None
        if of_step is None or not of_step.results:
            return
        run, result = self._run, _together(of_step.results)
        seconds = {"step": time.perf_counter() - of_step.started}
        metrics = step_metrics(result, UpdateReport(), seconds, of_step.reflections)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(OF_THE_TRAINER)}
        metrics |= ranking_metrics(result, run.limit, run.method.ranking) | of_step.more
        if run.rollouts_every and of_step.number % run.rollouts_every == 0:
            rows = rollout_rows(result, self._tokenizer, run.rollouts_groups, of_step.shown)
            self._directory.rollouts.write(of_step.number, rows, group_summaries(result))
        self._directory.metrics.append(of_step.number, metrics)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._directory.close()


def _opened(path: Path, run: Described, after: int | None) -> RunDirectory:
    there = RunFiles(path).info_path.exists()
    if there and after is not None:
        directory = RunDirectory.open(path)
        directory.rewind(after)
        return directory
    if there:
        RunDirectory.open(path).close()  # refuses while another process still writes to it
        log.warning("%s: starts anew, the record of an earlier run in it is removed", path)
        shutil.rmtree(path)
    return RunDirectory.create(path, yaml.safe_dump(_plain(run.settings), sort_keys=False), seed=run.seed)


def _together(results: list[StepResult]) -> StepResult:
    """The batches of a step as one."""
    if len(results) == 1:
        return results[0]
    counts: dict[str, float] = {}
    for name in results[0].counts:
        values = [result.counts.get(name, 0) for result in results]
        counts[name] = max(values) if name.endswith(("_max", "_mean")) else sum(values)
    weighted = tuple(w for result in results for w in result.weighted)
    return StepResult(weighted, tuple(mixed for result in results for mixed in result.groups), counts)


def _link(place: Path, buffer: SampleBuffer) -> None:
    """The trainer keeps the buffer's file elsewhere; by a relative link the folder can still be moved."""
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(buffer.path, place.parent))


def _plain(tree: Mapping[str, Any]) -> Any:
    """The value in types of JSON and YAML; other objects as text."""
    return json.loads(json.dumps(tree, default=str))


FILE = "r3_buffer.sqlite"


def open_buffer(path: str, checkpoint: str | None, *, per_query: int | None, total: int | None) -> SampleBuffer:
    """The buffer of a new run (empty), or of a resumed one (as it was at the checkpoint in that folder)."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    source = None if checkpoint is None else os.path.join(checkpoint, FILE)
    if source is not None and not os.path.exists(source):
        raise FileNotFoundError(
            f"{source} is missing: {checkpoint} was not written with R³; start a new run from its weights instead"
        )
    _make_way(path, warn=source is None)
    if source is not None:
        shutil.copyfile(source, path)
    return SampleBuffer(path, per_query=per_query, total=total)


def _make_way(path: str, *, warn: bool) -> None:
    """Remove an earlier run's live file: as with a trainer's checkpoints, a new run in the folder writes over it."""
    if not os.path.exists(path):
        return
    SampleBuffer(path).close()  # refuses while another process still writes to it
    if warn:
        log.warning("%s: starts empty, the samples of an earlier run in it are removed", path)
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            os.remove(name)


def save_buffer(buffer: SampleBuffer, folder: str) -> None:
    """Copy the buffer into the checkpoint in `folder`; the copy appears whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, FILE)
    partial = target + ".partial"
    if os.path.exists(partial):
        os.remove(partial)
    buffer.copy(partial)
    os.replace(partial, target)
    newest = buffer.stats().newest_step
    if newest is not None:
        buffer.settle(newest)  # a resume starts from a copy, so the live file is never rewound


def prune_copies(home: str, pattern: str, *, needs: str) -> None:
    """Remove the copies in checkpoints under `home` that the trainer has deleted: those without `needs`."""
    for copy in Path(home).glob(f"{pattern}/{FILE}"):
        if not (copy.parent / needs).exists():
            copy.unlink()
