"""What a step is made of: the queries in their order, and a verified group for each of its prompts.

`QueryStream` is one seeded shuffle per epoch, as a pure function of the position. The position is all there is to save:
a resumed run reads the very queries it would have read, and reading ahead changes nothing. `Revisits` adds the queries
that are asked again before their turn (`revisit`). How each query fared is saved in checkpoints, and the choice is
seeded by (seed, step): a resumed run asks the same queries as it would have asked uninterrupted.

`Sampler` has the prompts answered and judged, in turn with the update or beside it. `Ahead` draws the next step's
answers on another thread while this step's update runs (`rollout.ahead`). Its prompts are asked once this step's
answers are in the buffer, so they are those of a run that takes turns. Only the weights that answer them are one update
older: those before the update, of which the engine holds a copy. Samples say so (`policy_version`), and the update
corrects for it with truncated importance weights.

A checkpoint waits for the answers under way and keeps them, since it does not have the weights that drew them. What is
behind the prompts is not kept: a resumed run asks again, which gives the same ones.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from r3.algorithm import Asked, Prompt
from r3.judging import Answer, drawn, judge_all
from r3.method.revisit import RevisitSettings, Seen, choose, ready_again
from r3.method.reward import reward_parts
from r3.method.settings import RewardSettings
from r3.rollout import Engine, EngineBeside, Request, Response, Sampling
from r3.samples import Context, Group, Query, Sample, seed_of
from r3.tasks.task import Task
from r3.verify.judge import Verdict


class QueryStream:
    """Queries in training order, epoch after epoch."""

    def __init__(self, queries: Sequence[Query], *, seed: int, epochs: int | None) -> None:
        """`epochs` is None for a stream without an end."""
        self.queries = queries
        self.seed = seed
        self.epochs = epochs
        self.position = 0

    @property
    def end(self) -> int | None:
        """The position behind the last query, if there is one."""
        return None if self.epochs is None else len(self.queries) * self.epochs

    @property
    def exhausted(self) -> bool:
        return self.end is not None and self.position >= self.end

    def epoch_at(self, position: int) -> int:
        """The epoch (from 1) of a position."""
        return position // len(self.queries) + 1

    def take(self, count: int, left_out: Mapping[str, int] | None = None) -> list[tuple[Query, int]]:
        """The next `count` queries (fewer at the end of the last epoch), each with its epoch.

        Queries in `left_out` are skipped in epochs after the one given with their id; not all queries may be.
        """
        taken: list[tuple[Query, int]] = []
        while len(taken) < count and not self.exhausted:
            query, epoch = self._at(self.position)
            self.position += 1
            if left_out is None or left_out.get(query.id, epoch) >= epoch:
                taken.append((query, epoch))
        return taken

    def _at(self, position: int) -> tuple[Query, int]:
        epoch = self.epoch_at(position)
        order = _order(self.seed, epoch, len(self.queries))
        return self.queries[int(order[position % len(self.queries)])], epoch


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(n)


class Revisits:
    """Takes queries for a step and remembers how they were solved."""

    def __init__(self, stream: QueryStream, settings: RevisitSettings, *, seed: int) -> None:
        self.stream, self.settings, self.seed = stream, settings, seed
        self.seen: dict[str, Seen] = {}
        self.started = settings.start_at is None
        self.retired: dict[str, int] = {}
        """Queries that all answers solved, with the epoch of it."""
        self._queries = {query.id: query for query in stream.queries}

    def take(self, count: int, *, step: int) -> tuple[list[tuple[Query, int]], frozenset[int]]:
        """The queries of a step with their epoch, and which of them, by position, are asked before their turn."""
        if not self.settings.enabled:
            return self.stream.take(count), frozenset()
        most = int(self.settings.share * count) if self.started else 0
        fresh = self._in_turn(count - most)
        again = choose(
            self.seen,
            most,
            self.settings,
            step=step,
            rng=np.random.default_rng([self.seed, step]),
            leave_out={query.id for query, _ in fresh},
        )
        fresh += self._in_turn(count - len(fresh) - len(again))
        epoch = self.stream.epoch_at(max(0, self.stream.position - 1))
        batch = [*fresh, *((self._queries[name], epoch) for name in again)]
        return batch, frozenset(range(len(fresh), len(batch)))

    def _in_turn(self, count: int) -> list[tuple[Query, int]]:
        enough = len(self.stream.queries) - len(self.retired) >= count
        return self.stream.take(count, left_out=self.retired if enough else {})

    def learn(self, groups: Sequence[Group], *, step: int) -> dict[str, float]:
        """Remember how the queries of a step were solved. Returns counts for the metrics."""
        plain = [group for group in groups if group.context.kind == "plain"]
        if self.settings.enabled:
            outcomes = [outcome for group in plain for outcome in group.outcomes]
            start = self.settings.start_at
            self.started = self.started or (start is not None and sum(outcomes) / max(1, len(outcomes)) > start)
            for group in plain if self.started else []:
                self._remember(group, step)
        return {
            "revisit/asked": sum(group.revisited for group in plain),
            "revisit/pool": sum(0 < query.right < query.of for query in self.seen.values()),
            "revisit/retired": len(self.retired),
        }

    def _remember(self, group: Group, step: int) -> None:
        name = group.query.id
        before = self.seen.get(name)
        reused = (before.reused if before is not None else 0) + group.revisited
        rng = np.random.default_rng([self.seed, step, zlib.crc32(name.encode())])
        self.seen[name] = Seen(sum(group.outcomes), len(group), ready_again(step, self.settings, rng), reused)
        if self.settings.retire and group.solve_all:
            self.retired[name] = group.samples[0].epoch

    def state(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {
            "started": self.started,
            "retired": dict(self.retired),
            "seen": {name: [query.right, query.of, query.ready, query.reused] for name, query in self.seen.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.started, self.retired = state["started"], dict(state["retired"])
        self.seen = {name: Seen(*query) for name, query in state["seen"].items()}


class Sampler:
    """Draws a group for every prompt, verifies and rewards it."""

    def __init__(
        self, engine: Engine, task: Task, tokenizer: Any, sampling: Sampling, reward: RewardSettings, group_size: int
    ) -> None:
        self.engine = engine
        self.task = task
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.reward = reward
        self.group_size = group_size
        self.failed: Counter[str] = Counter()
        """How often each of the task's reward functions has failed in its cage so far."""

    def sample(self, prompts: Sequence[Prompt], *, step: int, version: int, seed: str) -> list[Group]:
        """A verified group for each prompt, in order. The responses depend on `seed` and the prompt's index."""
        sizes = [prompt.answers(self.group_size) for prompt in prompts]
        requests = [
            Request(prompt.tokens, size, seed_of(f"{seed}/{index}"))
            for index, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
        ]
        samples: list[list[Sample | None]] = [[None] * size for size in sizes]

        def keep(answer: Answer[Response], verdict: Verdict) -> None:
            response = answer.source
            prompt = prompts[response.request]
            samples[response.request][response.index] = self._sample(prompt, answer, verdict, step, version)

        asked = [(prompt.query, self.task.judge) for prompt in prompts]
        judge_all(drawn(self.engine, requests, self.sampling, self.tokenizer, asked), keep)
        return [
            prompt.group([sample for sample in row if sample is not None])
            for prompt, row in zip(prompts, samples, strict=True)
        ]

    def judged(self, given: Mapping[int, tuple[Query, Sample]], *, trusted: bool) -> dict[int, Sample]:
        """Answers that nobody drew, judged and rewarded as if they had been; `trusted` ones are right unseen."""
        if trusted:
            return {key: self._rewarded(sample, Verdict(True, "trusted")) for key, (_, sample) in given.items()}
        found: dict[int, Sample] = {}

        def keep(answer: Answer[int], verdict: Verdict) -> None:
            found[answer.source] = self._rewarded(given[answer.source][1], verdict)

        judge = self.task.judge
        judge_all((Answer(query, judge, sample.text or "", False, key) for key, (query, sample) in given.items()), keep)
        return found

    def _rewarded(self, sample: Sample, verdict: Verdict) -> Sample:
        limit = self.sampling.max_tokens
        parts = reward_parts(verdict.right, len(sample), self.reward, limit=limit, scores=verdict.scores)
        return sample.judged(verdict.right, sum(parts.values()), verdict.text, **parts)

    def _sample(self, prompt: Prompt, answer: Answer[Response], verdict: Verdict, step: int, version: int) -> Sample:
        response = answer.source
        right = verdict.right and not answer.truncated  # whatever the judge says: a cut answer is not an answer
        parts = reward_parts(
            right, len(response.tokens), self.reward, limit=self.sampling.max_tokens, scores=verdict.scores
        )
        self.failed.update(verdict.failed)
        return Sample(
            prompt.query.id,
            response.tokens,
            response.logprobs,
            response.entropies,
            finish=response.finish,
            outcome=right,
            reward=sum(parts.values()),
            reward_parts=parts,
            context=prompt.context,
            policy_version=version,
            step=step,
            epoch=prompt.epoch,
            text=answer.text,
            verdict=verdict.text,
        )


log = logging.getLogger(__name__)

Answers = list[tuple[list[int], list[Sample]]]
"""The tokens of each prompt, and what answers it."""
_ARRAYS = ("tokens", "logprobs", "entropies")


class Ahead:
    """At most one rollout that is begun before its step."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._own = copy.copy(sampler)
        self._own.failed = Counter()  # counted apart: they belong to the step that takes the answers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="r3-ahead")
        self._drawing: Future[list[Group]] | None = None
        self._answers: Answers | None = None
        self.asked: Asked | None = None
        """The prompts that were begun with, until somebody takes their answers."""

    @property
    def pending(self) -> bool:
        """Whether a step's answers are under way, or there already."""
        return self._drawing is not None or self._answers is not None

    def start(self, asked: Asked, *, step: int, version: int, seed: str) -> None:
        """Have these prompts answered from the weights as they are now; the update may begin when this returns."""
        engine = self._own.engine
        assert isinstance(engine, EngineBeside)
        engine.hold()
        self.asked = asked
        self._drawing = self._thread.submit(self._own.sample, asked.prompts, step=step, version=version, seed=seed)

    def wait(self) -> None:
        """Until all answers are there. From then on the engine draws from the policy's own weights again."""
        if self._drawing is not None:
            groups = self._drawing.result()
            self._own.engine.release()
            self._answers = [(group.prompt.tolist(), list(group.samples)) for group in groups]
            self._drawing = None

    def take(self, prompts: Sequence[Prompt]) -> list[Group] | None:
        """The groups that answer a step's prompts, once they are all there; None if nothing was begun for it."""
        self.wait()
        answers, self._answers, self.asked = self._answers, None, None
        failed, self._own.failed = self._own.failed, Counter()
        if answers is None:
            return None
        if [prompt.tokens.tolist() for prompt in prompts] != [tokens for tokens, _ in answers]:
            log.warning(
                "rollout.ahead: the data changed, and the checkpoint's answers are to other prompts: drawn anew"
            )
            return None
        self._sampler.failed.update(failed)
        return [prompt.group(samples) for prompt, (_, samples) in zip(prompts, answers, strict=True)]

    def close(self) -> None:
        """Give up what is under way."""
        if self._drawing is not None:
            engine = self._own.engine
            assert isinstance(engine, EngineBeside)
            engine.cancel()
            wait([self._drawing])
            engine.release()
            self._drawing = self.asked = None
        self._thread.shutdown()

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint, which waits for the answers."""
        self.wait()
        if self._answers is None:
            return None
        return {
            "answers": [(tokens, [_plain(sample) for sample in samples]) for tokens, samples in self._answers],
            "failed": dict(self._own.failed),
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """From a checkpoint."""
        if state is not None:
            self._answers = [(tokens, [_sample(found) for found in samples]) for tokens, samples in state["answers"]]
            self._own.failed = Counter(state["failed"])


def _plain(sample: Sample) -> dict[str, Any]:
    """The sample as what torch loads without running code."""
    found: dict[str, Any] = {field.name: getattr(sample, field.name) for field in fields(Sample)}
    for name in _ARRAYS:
        found[name] = None if found[name] is None else torch.from_numpy(found[name].copy())
    found["context"] = (sample.context.kind, sample.context.shown)
    found["reward"] = float(sample.reward)
    found["reward_parts"] = {name: float(part) for name, part in sample.reward_parts.items()}
    return found


def _sample(found: dict[str, Any]) -> Sample:
    arrays = {name: None if found[name] is None else np.asarray(found[name].numpy()) for name in _ARRAYS}
    return Sample(**{**found, **arrays, "context": Context(*found["context"])})
