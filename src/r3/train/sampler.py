"""From prompts to verified groups: every response is judged as soon as it is finished, while others are generated."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from r3.algorithm import Prompt, seed_of
from r3.method.reward import reward_parts
from r3.method.settings import RewardSettings
from r3.rollout.protocol import Engine, Request, Response, Sampling
from r3.samples import Group, Sample
from r3.tasks.base import Task, Verdict

TRUNCATED = Verdict(False, "truncated")


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
        self._judges = ThreadPoolExecutor(2, thread_name_prefix="r3-verify")

    def sample(self, prompts: Sequence[Prompt], *, step: int, version: int, seed: str) -> list[Group]:
        """A verified group for each prompt, in order. The responses depend on `seed` and the prompt's index."""
        sizes = [prompt.answers(self.group_size) for prompt in prompts]
        requests = [
            Request(prompt.tokens, size, seed_of(f"{seed}/{index}"))
            for index, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
        ]
        answers: list[list[Future[Sample] | None]] = [[None] * size for size in sizes]
        for response in self.engine.generate(requests, self.sampling):
            judged = self._judges.submit(self._judged, prompts[response.request], response, step, version)
            answers[response.request][response.index] = judged
        return [
            prompt.group([judged.result() for judged in row if judged is not None])
            for prompt, row in zip(prompts, answers, strict=True)
        ]

    def _judged(self, prompt: Prompt, response: Response, step: int, version: int) -> Sample:
        text = self.tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True)
        truncated = response.finish == "length"
        verdict = TRUNCATED if truncated else self.task.verify(prompt.query, text)
        parts = reward_parts(verdict.right, len(response.tokens), self.reward, limit=self.sampling.max_tokens)
        if verdict.share is not None and not verdict.right:
            parts["tests"] = verdict.share
        return Sample(
            prompt.query.id,
            response.tokens,
            response.logprobs,
            response.entropies,
            finish=response.finish,
            outcome=verdict.right,
            reward=sum(parts.values()),
            reward_parts=parts,
            context=prompt.context,
            policy_version=version,
            step=step,
            epoch=prompt.epoch,
            text=text,
            verdict=verdict.text,
        )

    def close(self) -> None:
        self._judges.shutdown(cancel_futures=True)
