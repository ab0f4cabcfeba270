"""A run from its first step to its last: directory, checkpoints, progress, evaluation, stopping and resuming."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r3.algorithm import Algorithm
from r3.buffer import SampleBuffer
from r3.config import Config, dump, validate
from r3.errors import ConfigError
from r3.evaluate.run import evaluate
from r3.method.mixed import StepResult
from r3.policy.update import Diverged
from r3.policy.world import World
from r3.rollout import Sampling
from r3.run import (
    Checkpoint,
    Progress,
    RunDirectory,
    RunFiles,
    Sink,
    StopRequested,
    open_sinks,
    refuse_run,
    resume_command,
)
from r3.run.metrics import Label
from r3.train import STOPPED, AnyCallback, Callbacks
from r3.train.build import Parts, build, check_ahead, make_sampler
from r3.train.loop import Trainer
from r3.train.processes import SharedEngine, Start, dismiss, make_updater, serve
from r3.train.record import NeverRight, alarms, group_summaries, rollout_rows
from r3.train.resume import (
    changed_settings,
    check_files,
    check_inputs,
    inputs_of,
    restore,
    save,
    save_contents,
    saved_settings,
)
from r3.train.sampler import QueryStream

log = logging.getLogger(__name__)
Functions = Mapping[str, Callable[..., Any]]
"""Rewards that were given as objects, by name."""

SHOWN = {
    "reward": "reward",
    "accuracy": "accuracy",
    "solve none": "solve_none",
    "solve all": "solve_all",
    "entropy": "entropy",
    "tokens/s": "tokens_per_second",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended."""

    directory: Path
    step: int
    stopped_by: str | None
    """The signal that stopped it, `callback`, or None if it ran to its end."""


def train(
    config: Config,
    resume: Path | None = None,
    *,
    allow_changed_data: bool = False,
    callbacks: Sequence[AnyCallback] = (),
    functions: Functions = MappingProxyType({}),
) -> Finished | None:
    """Train as the config says; with `resume`, go on with the run in that directory.

    `functions` are the rewards that no dotted path names, by name.
    Started several times by torchrun or accelerate, the first process leads; in the others it serves and returns None.
    """
    told = Callbacks(callbacks)
    world = World.join(config.model.device)
    if world.rank > 0:
        checkpoint = RunFiles(resume).checkpoints.latest() if resume is not None and config.model.lora.enabled else None
        serve(config, world, _adapters(config, checkpoint))
        finished = None
    else:
        try:
            if resume is None:
                finished = _begin(config, world, told, functions)
            else:
                finished = _go_on(config, resume, world, told, functions, allow_changed_data=allow_changed_data)
        finally:
            dismiss(world)
    world.leave()
    return finished


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Where a run goes on, after everything was found to be there."""

    checkpoint: Checkpoint | None
    """None: it has none yet and starts over."""
    inputs: Mapping[str, Any]
    notes: Mapping[str, Any]


def _begin(config: Config, world: World, told: Callbacks, functions: Functions) -> Finished:
    refuse_run(run_path(config))  # before the model is loaded, which may take minutes
    parts = _build(config, None, world, functions)
    with RunDirectory.create(run_path(config), dump(config, run_path(config)), seed=config.run.seed) as directory:
        directory.update_info(inputs=_inputs(parts))
        return _run(parts, directory, None, world, told)


def _go_on(
    config: Config, path: Path, world: World, told: Callbacks, functions: Functions, *, allow_changed_data: bool
) -> Finished:
    """Check all that the run needs, the cheapest first, before anything of it is changed."""
    with RunDirectory.open(path) as directory:
        checkpoint = check_files(directory)
        parts = _build(config, checkpoint, world, functions)
        inputs = _inputs(parts)
        notes = check_inputs(directory, inputs, allowed=allow_changed_data)
        if changed := changed_settings(validate(saved_settings(directory, directory.info)), config):
            notes["settings"] = changed
        return _run(parts, directory, _Resumed(checkpoint, inputs, notes), world, told)


def _inputs(parts: Parts) -> dict[str, Any]:
    return inputs_of(parts.task, parts.prompts, parts.earlier, parts.config.task.own_functions)


def _build(config: Config, checkpoint: Checkpoint | None, world: World, functions: Functions) -> Parts:
    check_ahead(config, world.size)
    parts = build(config, adapters_from=_adapters(config, checkpoint), functions=functions)
    return parts if world.size == 1 else replace(parts, engine=SharedEngine(parts.engine, world))


def _adapters(config: Config, checkpoint: Checkpoint | None) -> Path | None:
    return checkpoint.path / "policy" if checkpoint is not None and config.model.lora.enabled else None


def _run(parts: Parts, directory: RunDirectory, resumed: _Resumed | None, world: World, told: Callbacks) -> Finished:
    limits = parts.config.buffer
    with SampleBuffer(directory.buffer_path, per_query=limits.per_query, total=limits.total) as buffer:
        try:
            return _Session(parts, directory, buffer, resumed, world, told).run()
        except (FloatingPointError, Diverged) as error:
            raise Diverged(
                f"{error}; a resume may lower train.learning_rate and train.max_grad_norm: "
                f"{resume_command(directory.path)} train.learning_rate={parts.config.train.learning_rate / 2:g}"
            ) from error


def label_of(config: Config) -> Label:
    """What a tracking service calls the run."""
    run = config.run
    name = None if run.name is None else _filled_in(config, "run.name", run.name)
    return Label(run.project, name, run.group, tuple(run.tags))


def _filled_in(config: Config, setting: str, text: str) -> str:
    names = {"{method}": config.method.name, "{task}": config.task.name, "{seed}": str(config.run.seed)}
    # Not str.format: it also takes widths, and {seed:9999999999} is a name of ten gigabytes.
    name = re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)
    if "{" in name or "}" in name:
        raise ConfigError(f"{setting}={text}: only {{method}}, {{task}} and {{seed}} can be filled in")
    return name


def run_path(config: Config) -> Path:
    """run.dir with its names filled in."""
    name = _filled_in(config, "run.dir", config.run.dir)
    if not name or len(name) > 4000 or any(len(os.fsencode(part)) > 255 for part in Path(name).parts):
        raise ConfigError(f"run.dir={name[:100]}: no name that a directory can have; choose a shorter one")
    return Path(name)


class _Session:
    """The loop around `Trainer.train_step`."""

    def __init__(
        self,
        parts: Parts,
        directory: RunDirectory,
        buffer: SampleBuffer,
        resumed: _Resumed | None,
        world: World,
        told: Callbacks,
    ) -> None:
        self.told = told
        self.parts, self.config, self.directory, self.buffer = parts, parts.config, directory, buffer
        self.world, config = world, parts.config
        if config.method.objective.kl > 0:
            parts.policy.keep_reference()
        epochs = config.train.epochs if config.train.steps is None else None
        stream = QueryStream(parts.task.train, seed=config.run.seed, epochs=epochs)
        self.total_steps = total_steps(config, len(parts.task.train))
        total_updates = self.total_steps * config.train.updates_per_batch
        exact = parts.engine.exact and not config.rollout.ahead  # else fresh samples may be an update old
        checkpoint = resumed.checkpoint if resumed is not None else None
        if world.size > 1:
            world.broadcast(Start(total_updates, checkpoint.path.absolute() if checkpoint is not None else None))
        updater = make_updater(config, parts.policy, total_updates, exact=exact, world=world)
        sampler = make_sampler(parts)
        algorithm = Algorithm(
            config.settled().method,
            buffer,
            parts.policy.tokenizer,
            seed=config.run.seed,
            earlier=parts.earlier,
            prompts=parts.prompts,
        )
        self.trainer = Trainer(config, stream, sampler, algorithm, updater)
        self._never_right = NeverRight(config.task)
        if checkpoint is not None:
            restore(self.trainer, checkpoint.path)
        # All is loaded: only now is anything of the run taken back.
        if resumed is not None:
            directory.rewind(checkpoint.step if checkpoint is not None else -1, notes=resumed.notes)
            directory.update_info(inputs=resumed.inputs)
        if directory.info.get("total_steps") != self.total_steps:  # a resume may go on for longer
            directory.update_info(total_steps=self.total_steps)
        buffer.forget_after(self.trainer.step)
        names = [name for name in ("tensorboard", "wandb", "trackio") if getattr(config.run, name)]
        self.sinks: list[Sink] = open_sinks(
            names,
            directory,
            label=label_of(config),
            config=config.model_dump(mode="json"),
            resumed_at=self.trainer.step if resumed is not None else None,
        )
        self.tokens = 0
        """Generated in training so far, by this run and those that it resumes."""

    def run(self) -> Finished:
        past = list(self.directory.metrics.read())
        self.tokens = sum(int(line.get("tokens/generated", 0)) for line in past)
        try:
            stopping = StopRequested(last_words=self.world.size > 1)
            with Progress(self.total_steps, SHOWN, past=past) as progress, stopping as stop:
                if self.directory.metrics.last_step is None:
                    progress.say(f"run directory: {self.directory.path}")
                    progress.phase("evaluating before training")
                    self._record(0, self._evaluation())
                while not (self._finished or stop or self.told):
                    self._step(progress)
                if stop or self.told:
                    first = "waiting for the next step's answers, then " if self.trainer.ahead.pending else ""
                    progress.say(f"stopping: {first}writing a checkpoint")
                if self.trainer.step not in self.directory.checkpoints.steps():
                    self._checkpoint()
        finally:
            self.trainer.ahead.close()
            self.parts.task.judge.close()
            if self.parts.earlier is not None:
                self.parts.earlier.close()
            for sink in self.sinks:
                sink.close()
        stopped_by = stop.name or (STOPPED if self.told and not self._finished else None)
        if stopped_by is not None:
            log.warning("stopped after step %d; go on with: %s", self.trainer.step, resume_command(self.directory.path))
        return Finished(self.directory.path, self.trainer.step, stopped_by)

    @property
    def _finished(self) -> bool:
        return self._is_last(0)

    def _is_last(self, tokens: int) -> bool:
        """Whether the run is over with the trainer's step, which generated so many tokens not counted yet."""
        budget = self.config.train.tokens
        spent = budget is not None and self.tokens + tokens >= budget
        return spent or self.trainer.exhausted or self.trainer.step >= self.total_steps

    def _evaluation_due(self, tokens_before: int) -> bool:
        """After the last step, every so many steps, and whenever the tokens have crossed a line of their grid."""
        every, grid = self.config.evaluate.every, self.config.evaluate.every_tokens
        by_steps = every > 0 and self.trainer.step % every == 0
        return self._finished or by_steps or (grid > 0 and self.tokens // grid > tokens_before // grid)

    def _step(self, progress: Progress) -> None:
        run, before = self.config.run, self.tokens
        progress.phase("training")
        result, metrics = self.trainer.train_step(self._is_last)
        step = self.trainer.step
        self.tokens += int(metrics["tokens/generated"])
        metrics["tokens/total"] = self.tokens
        if self._evaluation_due(before):
            progress.phase("evaluating")
            metrics |= self._evaluation()
        self._save_rollouts(step, result)
        self._record(step, metrics)
        for told in (*alarms(metrics, len(result.samples)), *self._never_right.alarms(result)):
            log.warning("step %d: %s", step, told)
        if self.config.train.tokens is not None:  # the budget ends the run: expect as many tokens per step as so far
            progress.total = min(self.total_steps, max(step, round(step * self.config.train.tokens / self.tokens)))
        progress.update(step, metrics)
        if step % run.checkpoint_every == 0:
            self._checkpoint()

    def _evaluation(self) -> dict[str, Any]:
        """Held-out accuracy under the plain prompt, asked in the same way every time."""
        if not self.parts.task.heldout:
            return {}
        self.trainer.ahead.wait()  # the engine is to draw from the weights as they are now
        settings = self.config.evaluate
        sampling = Sampling(
            max_tokens=self.config.evaluation_limit,
            stop_tokens=self.parts.sampling.stop_tokens,
            temperature=settings.temperature,
        )
        heldout = evaluate(
            self.parts.engine,
            self.parts.task,
            [(query, self.parts.prompts(query)) for query in self.parts.task.heldout],
            self.parts.policy.tokenizer,
            sampling,
            samples=settings.samples,
            seed=self.config.run.seed,
        )
        return heldout.metrics()

    def _record(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.directory.metrics.append(step, metrics)
        for sink in self.sinks:
            sink.log(step, metrics)
        self.told.step(step, {"step": step, **metrics})

    def _save_rollouts(self, step: int, result: StepResult) -> None:
        every = self.config.run.rollouts_every
        if every and step % every == 0:
            tokenizer, groups = self.parts.policy.tokenizer, self.config.run.rollouts_groups
            rows = rollout_rows(result, tokenizer, groups, self.trainer.notes)
            self.directory.rollouts.write(step, rows, group_summaries(result))

    def _checkpoint(self) -> None:
        checkpoints = self.directory.checkpoints
        written = checkpoints.write(self.trainer.step, self._fill)
        self.directory.update_info(checkpoint=self.trainer.step)
        checkpoints.prune(self.config.run.keep_checkpoints)
        self.buffer.settle(min(checkpoints.steps()))
        self.told.checkpoint(written.step, written.path)

    def _fill(self, folder: Path) -> None:
        save(self.trainer, folder)
        save_contents(self.buffer, folder)


def total_steps(config: Config, queries: int) -> int:
    """Steps of the whole run: train.steps, or those of its epochs (with resampling, which reads ahead, fewer)."""
    return config.train.steps or -(-queries * config.train.epochs // config.train.queries_per_step)
