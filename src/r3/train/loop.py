"""Algorithm 1. `Trainer.train_step` is the paper's loop body, in its order; what it calls lives in other rooms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from r3.buffer import SampleBuffer
from r3.config import Config
from r3.method.reflection import plain_prompt
from r3.method.step import StepResult, is_mixed, step
from r3.policy.packing import Trajectory
from r3.policy.update import Updater, UpdateReport
from r3.samples import Group, IntArray, Query, Sample
from r3.tasks.base import Task
from r3.train.metrics import step_metrics
from r3.train.recall import past_samples, reflections
from r3.train.record import StepNotes
from r3.train.sampler import Prompt, Sampler
from r3.train.stream import QueryStream

Batch = Sequence[tuple[Query, int]]


class Trainer:
    """The state of a run, and one step of it."""

    def __init__(
        self, config: Config, task: Task, stream: QueryStream, sampler: Sampler, buffer: SampleBuffer, updater: Updater
    ) -> None:
        self.config = config.settled()
        self.task = task
        self.stream = stream
        self.sampler = sampler
        self.buffer = buffer
        self.updater = updater
        self.tokenizer = updater.policy.tokenizer
        self.step = 0
        self.version = 0
        """Optimiser updates made so far: the policy's version."""
        self._prompts: dict[str, IntArray] = {}
        self._seconds: dict[str, float] = {}
        self._reflections: dict[str, int] = {}
        self.notes = StepNotes()
        """On the last step, for its saved rollouts."""

    def train_step(self) -> tuple[StepResult, dict[str, Any]]:
        """One pass through Algorithm 1: a batch D_b from prompts to an updated policy. Returns it and its metrics."""
        self.step += 1
        self._seconds = {}
        started = time.perf_counter()
        batch = self.stream.take(self.config.train.queries_per_step)
        with self._timed("prompts"):
            prompts = self.plain_prompts(batch) + self.reflection_prompts(batch)  # ISR: hard queries reflect
        with self._timed("rollout"):
            groups = self.sample(prompts)  # a group per prompt, verified as responses finish
            groups += self.resample(groups)  # DAPO: other queries for groups without variance
            self.sampler.engine.release()  # its memory is the update's now
            groups = self.with_entropies(groups)  # for SERR, where the engine gave none
        with self._timed("history"):
            history = self.history(groups)  # what replay may choose from
        with self._timed("method"):
            result = step(  # SERR, CCR, Eq. 3
                groups,
                self.config.method,
                history=history,
                policy_version=self.version,
                seed=self.config.run.seed,
            )
        with self._timed("buffer"):
            stored = self.buffer.add(result.samples)  # S ← S ∪ D_b's responses
        with self._timed("update"):
            seed = (self.config.run.seed, self.step)
            report = self.updater.update(result.weighted, version=self.version, seed=seed)  # θ
        self.version += report.updates + report.skipped
        self.notes = self._notes(result, stored, report)
        self._seconds["step"] = time.perf_counter() - started
        metrics = step_metrics(result, report, self._seconds, self._reflections)
        progress = {"epoch": self.stream.epoch_at(self.stream.position - 1), "policy_version": self.version}
        return result, {**progress, **metrics}

    def _notes(self, result: StepResult, stored: Sequence[int], report: UpdateReport) -> StepNotes:
        samples = [w.sample for w in result.weighted]
        moved = [w.other_context for w in result.weighted]
        shown = {m.group.context.shown for m in result.groups[: self.config.run.rollouts_groups]} - {None}
        return StepNotes(
            ids={id(sample): number for sample, number in zip(result.samples, stored, strict=True)},
            log_ratios={id(samples[i]): ratios for i, ratios in report.log_ratios.items() if not moved[i]},
            shown=self.buffer.find(number for number in shown if number is not None),
        )

    def plain_prompts(self, batch: Batch) -> list[Prompt]:
        """Every query as it is."""
        return [Prompt(query, epoch, self.plain_tokens(query)) for query, epoch in batch]

    def reflection_prompts(self, batch: Batch) -> list[Prompt]:
        """A second prompt for each hard query of the batch, showing one of its past failures (ISR)."""
        seed = f"{self.config.run.seed}/{self.step}"
        made, self._reflections = reflections(
            self.buffer, batch, self.tokenizer, self.config.method.reflection, seed=seed
        )
        return [
            Prompt(*batch[place], reflection.prompt, reflection.context, self.plain_tokens(batch[place][0]))
            for place, reflection in made
            if reflection.prompt is not None and reflection.context is not None
        ]

    def sample(self, prompts: Sequence[Prompt], rounds: int = 0) -> list[Group]:
        """A verified group for each prompt."""
        seed = f"{self.config.run.seed}/{self.step}/{rounds}"
        return self.sampler.sample(prompts, step=self.step, version=self.version, seed=seed)

    def resample(self, groups: Sequence[Group]) -> list[Group]:
        """Groups of further queries until enough of a batch has variance (DAPO's dynamic sampling)."""
        settings = self.config.method.resample
        more: list[Group] = []
        if not settings.enabled:
            return more
        for rounds in range(1, settings.max_rounds + 1):
            missing = self.config.train.queries_per_step - sum(is_mixed(group) for group in [*groups, *more])
            batch = self.stream.take(max(0, missing))
            if not batch:
                break
            more += self.sample(self.plain_prompts(batch), rounds)
        return more

    def with_entropies(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, with entropies where the ranking reward may look and the engine measured none."""
        ranking = self.config.method.ranking
        bare = [
            (i, j)
            for i, group in enumerate(groups)
            if ranking.enabled and group.solve_none
            for j, sample in enumerate(group.samples)
            if sample.entropies is None and (sample.truncated or ranking.scope == "failed")
        ]
        if not bare:
            return list(groups)
        sequences = [Trajectory(groups[i].prompt, groups[i].samples[j].tokens) for i, j in bare]
        samples = [list(group.samples) for group in groups]
        for (i, j), entropies in zip(bare, self.updater.entropies(sequences), strict=True):
            samples[i][j] = replace(samples[i][j], entropies=entropies)
        return [replace(group, samples=tuple(own)) for group, own in zip(groups, samples, strict=True)]

    def history(self, groups: Sequence[Group]) -> Mapping[str, Sequence[Sample]]:
        """Past samples of the opposite outcome for every homogeneous group, as far as the age cap reaches."""
        return past_samples(self.buffer, groups, self.config.method.replay, self.version)

    def plain_tokens(self, query: Query) -> IntArray:
        if query.id not in self._prompts:
            self._prompts[query.id] = plain_prompt(query, self.tokenizer)
        return self._prompts[query.id]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - started
