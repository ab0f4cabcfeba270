"""The next step's answers, drawn on another thread while this step's update runs (`rollout.ahead`).

Its prompts are asked once this step's answers are in the buffer, so they are those of a run that takes turns. Only the
weights that answer them are one update older: those before the update, of which the engine holds a copy. Samples say so
(`policy_version`), and the update corrects for it with truncated importance weights.

A checkpoint waits for the answers under way and keeps them, since it does not have the weights that drew them. What is
behind the prompts is not kept: a resumed run asks again, which gives the same ones.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from r3.algorithm import Asked, Prompt
from r3.rollout.protocol import EngineBeside
from r3.samples import Context, Group, Sample
from r3.train.sampler import Sampler

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
