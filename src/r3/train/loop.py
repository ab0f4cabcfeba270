"""Algorithm 1 with our own engine and update. `Trainer.train_step` is the paper's loop body, in its order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, get_args

from r3.algorithm import Algorithm, Asked, Prompt
from r3.config import Config
from r3.method.distill import Shown
from r3.method.mixed import StepResult
from r3.policy.packing import Trajectory
from r3.policy.update import Updater, UpdateReport
from r3.samples import FloatArray, Group, Sample
from r3.train.record import StepNotes, ranking_metrics, step_metrics
from r3.train.sampler import Ahead, QueryStream, Revisits, Sampler


class Trainer:
    """The state of a run, and one step of it."""

    def __init__(
        self, config: Config, stream: QueryStream, sampler: Sampler, algorithm: Algorithm, updater: Updater
    ) -> None:
        self.config = config.settled()
        self.stream = stream
        self.revisits = Revisits(stream, config.method.revisit, seed=config.run.seed)
        self.sampler = sampler
        self.algorithm = algorithm
        self.updater = updater
        self.ahead = Ahead(sampler)
        self.step = 0
        self.version = 0
        """Optimiser updates made so far: the policy's version."""
        self.position = 0
        """The stream's position behind the last query of the steps so far: those asked ahead come after it."""
        self._seconds: dict[str, float] = {}
        self._measured = 0
        """Answers whose entropies the engine did not give, in the last step."""
        self._lessons: dict[str, int] = {}
        """Answers that self-distillation taught in the last step, by what the teacher was shown."""
        self.notes = StepNotes()
        """On the last step, for its saved rollouts."""

    def train_step(self, is_last: Callable[[int], bool] = lambda _: False) -> tuple[StepResult, dict[str, Any]]:
        """One pass through Algorithm 1: a batch D_b from prompts to an updated policy. Returns it and its metrics.

        `is_last` says whether the run ends with this step, given how many tokens it generated.
        """
        self.step += 1
        self._seconds = {}
        with self._timed("step"):
            with self._timed("prompts"):
                asked = self.ahead.asked or self.ask(self.step)
            with self._timed("rollout"):
                groups = self.ahead.take(asked.prompts) or self.sample(asked.prompts)  # verified as responses finish
                groups += self.follow_up(asked.prompts, groups)  # hints, refinements: what a method asks next
                groups += self.resample(groups)  # DAPO: other queries for groups without variance
                self.sampler.engine.release()  # its memory is the update's now
                groups = self.with_entropies(groups)  # for SERR, where the engine gave none
                teacher = self.taught(groups)  # SDPO: the policy that sees a right answer, on what it wrote without
                demonstrations = self.demonstrated(groups)  # LUFFY: right answers from the data
            with self._timed("method"):
                # SERR, CCR, Eq. 3, S ← S ∪ responses
                result = self.algorithm.learn(
                    groups, version=self.version, teacher=teacher, demonstrations=demonstrations
                )
                revisits = self.revisits.learn(groups, step=self.step)
            self.position = self.stream.position
            if self.config.rollout.ahead and not is_last(sum(map(len, result.samples))):
                self.ask_ahead()
            with self._timed("update"):
                seed = (self.config.run.seed, self.step)
                report = self.updater.update(result.weighted, version=self.version, seed=seed)  # θ
            self.algorithm.first_replayed(result, report.start_logprobs)
            self.version += report.updates + report.skipped
            self.notes = self._notes(result, report)
        return result, {**self._metrics(asked, result, report), **revisits}

    @property
    def exhausted(self) -> bool:
        """Whether there are no queries left for another step."""
        return self.stream.exhausted and not self.ahead.pending

    def ask(self, step: int) -> Asked:
        """The prompts of a step: its queries, and the hard ones once more with a past failure (ISR)."""
        batch, revisited = self.revisits.take(self.config.train.queries_per_step, step=step)
        return self.algorithm.ask(batch, step=step, revisited=revisited)

    def ask_ahead(self) -> None:
        """Have the next step's prompts answered from now on, while the update runs."""
        step = self.step + 1
        self.ahead.start(self.ask(step), step=step, version=self.version, seed=self._seed(step))

    def sample(self, prompts: Sequence[Prompt], rounds: int | str = 0) -> list[Group]:
        """A verified group for each prompt."""
        seed = self._seed(self.step, rounds)
        return self.sampler.sample(prompts, step=self.step, version=self.version, seed=seed)

    def follow_up(self, asked: Sequence[Prompt], groups: Sequence[Group]) -> list[Group]:
        """Groups of what the algorithm asks after the first answers, round by round, until it asks nothing more."""
        prompts, more = list(asked), list[Group]()
        for rounds in count(1):
            following = self.algorithm.follow_up(prompts, [*groups, *more], step=self.step)
            if not following:
                break
            prompts += following
            more += self.sample(following, f"follow-up/{rounds}")
        return more

    def demonstrated(self, groups: Sequence[Group]) -> dict[int, Sample]:
        """The demonstrations that may join the groups, judged."""
        given = self.algorithm.demonstrations(groups, version=self.version)
        trusted = self.config.method.demonstration.trusted
        return self.sampler.judged({i: (groups[i].query, sample) for i, sample in given.items()}, trusted=trusted)

    def _seed(self, step: int, rounds: int | str = 0) -> str:
        return f"{self.config.run.seed}/{step}/{rounds}"

    def resample(self, groups: Sequence[Group]) -> list[Group]:
        """Groups of further queries until enough of a batch has variance (DAPO's dynamic sampling)."""
        more: list[Group] = []
        for rounds in range(1, self.config.method.resample.max_rounds + 1):
            batch = self.stream.take(self.algorithm.missing([*groups, *more], self.config.train.queries_per_step))
            if not batch:
                break
            more += self.sample(self.algorithm.plain_prompts(batch), rounds)
        return more

    def with_entropies(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, with entropies where the ranking reward will look and the engine measured none."""
        missing = self.algorithm.needs_entropies(groups)
        self._measured = len(missing)
        if not missing:
            return list(groups)
        sequences = [Trajectory(groups[g].prompt, groups[g].samples[member].tokens) for g, member in missing]
        samples = [list(group.samples) for group in groups]
        for (g, member), entropies in zip(missing, self.updater.entropies(sequences), strict=True):
            samples[g][member] = replace(samples[g][member], entropies=entropies)
        return [replace(group, samples=tuple(measured)) for group, measured in zip(groups, samples, strict=True)]

    def taught(self, groups: Sequence[Group]) -> dict[tuple[int, int], FloatArray]:
        """The log-probs of the answers that self-distillation teaches, under the teacher's prompts."""
        lessons = self.algorithm.lessons(groups)
        shown = Counter(lesson.shown for lesson in lessons)
        self._lessons = {f"distill/{name}": shown[name] for name in get_args(Shown)}
        if not lessons:
            return {}
        sequences = [Trajectory(one.prompt, groups[one.group].samples[one.member].tokens) for one in lessons]
        logprobs = self.updater.logprobs(sequences)
        return {(one.group, one.member): found for one, found in zip(lessons, logprobs, strict=True)}

    def _notes(self, result: StepResult, report: UpdateReport) -> StepNotes:
        """What the saved rollouts tell beside the result."""
        log_ratios = {
            (weighted.group, weighted.member): report.log_ratios[i]
            for i, weighted in enumerate(result.weighted)
            if i in report.log_ratios and not weighted.other_context
        }
        shown = {mixed.group.context.shown for mixed in result.groups[: self.config.run.rollouts_groups]} - {None}
        attempts = self.algorithm.buffer.find(number for number in shown if number is not None)
        return StepNotes(log_ratios, attempts)

    def _metrics(self, asked: Asked, result: StepResult, report: UpdateReport) -> dict[str, Any]:
        progress = {
            "epoch": self.stream.epoch_at(self.position - 1),
            "policy_version": self.version,
            "forwards/extra": report.extra_forwards + self._measured + sum(self._lessons.values()),
            **self._lessons,
        }
        failed = dict(self.sampler.failed)
        self.sampler.failed.clear()
        ranking = ranking_metrics(result, self.config.rollout.max_tokens, self.config.method.ranking)
        return {**progress, **step_metrics(result, report, self._seconds, asked.counts, failed), **ranking}

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - started
