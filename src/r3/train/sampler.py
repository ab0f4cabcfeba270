"""From prompts to verified groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from r3.algorithm import Prompt, seed_of
from r3.judging import Answer, drawn, judge_all
from r3.method.reward import reward_parts
from r3.method.settings import RewardSettings
from r3.rollout.protocol import Engine, Request, Response, Sampling
from r3.samples import Group, Query, Sample
from r3.tasks.task import Task
from r3.verify.judge import Verdict


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
