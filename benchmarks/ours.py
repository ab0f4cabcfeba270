"""r3's side of the GPU benchmarks: a random policy's update, and a whole training step on given work.

The step is the real `Trainer`'s, with an engine under forced lengths and a task that judges by checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from r3.algorithm import Algorithm
from r3.buffer import SampleBuffer
from r3.config import Config, TrainSettings
from r3.method.mixed import WeightedSample
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.policy import ModelSettings
from r3.policy.model import Policy, enable_checkpointing
from r3.policy.optimiser import Optimiser
from r3.policy.update import Updater
from r3.rollout import Engine, Request, Response, RolloutSettings, Sampling
from r3.samples import Group, Query, Sample
from r3.train.loop import Trainer
from r3.train.sampler import QueryStream, Sampler
from r3.verify.judge import Judge, PlainJudge, Verdict
from work import Work, lognormal


def is_right(prompt: str, completion: str, *, hard: float = 0.0, luck: float = 0.0) -> float:
    """1 or 0 by the texts' checksum, so that every system judges alike: a share `hard` of the prompts is solved in a
    share `luck` of all tries, the others in half of them."""
    is_hard = zlib.crc32(prompt.encode()) % 1000 < 1000 * hard
    return float(zlib.crc32((prompt + completion).encode()) % 1000 < 1000 * (luck if is_hard else 0.5))


def make_updater(model: Any, tokenizer: Any, tokens: int, learning_rate: float = 1e-6) -> Updater:
    """The update over a model: AdamW with float32 masters, packed micro-batches, on a card gradient checkpointing."""
    checkpointing = model.device.type == "cuda"
    settings = ModelSettings(path="random", gradient_checkpointing=checkpointing)
    if checkpointing:
        enable_checkpointing(model)
    policy = Policy(model, tokenizer, settings, base=model)
    train = TrainSettings(tokens_per_microbatch=tokens, learning_rate=learning_rate)
    optimiser = Optimiser(model.parameters(), train, total_updates=100)
    return Updater(policy, optimiser, MethodSettings(name="grpo").objective, train, temperature=1.0)


def weighted_samples(
    work: Work,
    completion: Callable[[Work, int, int], list[int]],
    reward: Callable[[str, str], float],
    tokenizer: Any,
) -> tuple[WeightedSample, ...]:
    """The work's completions as GRPO's weighted samples; groups without variance are left out, as in training."""
    groups = []
    for number, (prompt, lengths) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        text = tokenizer.decode(prompt.tolist())
        samples = []
        for index in range(len(lengths)):
            tokens = completion(work, number, index)
            value = reward(text, tokenizer.decode(tokens, skip_special_tokens=True))
            samples.append(
                Sample(
                    f"q{number}",
                    np.array(tokens, np.int32),
                    np.full(len(tokens), -np.log(len(tokenizer)), np.float32),
                    np.full(len(tokens), np.log(len(tokenizer)), np.float32),
                    finish="stop",
                    outcome=value > 0,
                    reward=value,
                )
            )
        groups.append(Group(Query(f"q{number}", text), tuple(samples), prompt))
    return step(groups, MethodSettings(name="grpo")).weighted


LUCK = 1 / 32
"""Share of tries that solve a hard prompt: below R³'s τ, so it reflects on them, yet there is something to replay."""


class Forced:
    """An engine whose responses have the work's lengths; those to other prompts (reflection) are drawn alike.

    A response below the common limit counts as stopped, though no token ended it: random weights never stop.
    """

    def __init__(self, engine: Engine, work: Work, mean: float) -> None:
        self.engine, self.mean, self.exact = engine, mean, engine.exact
        pairs = zip(work.prompts, work.lengths, strict=True)
        self.lengths = {prompt.tobytes(): lengths for prompt, lengths in pairs}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        limited = [replace(request, limits=self._limits(request, sampling)) for request in requests]
        for response in self.engine.generate(limited, sampling):
            cut = len(response.tokens) < sampling.max_tokens
            yield replace(response, finish="stop") if cut else response

    def _limits(self, request: Request, sampling: Sampling) -> tuple[int, ...]:
        known = self.lengths.get(np.ascontiguousarray(request.prompt, np.int32).tobytes())
        if known is not None:
            return known[: request.n]  # a hard query's reflection may take the rest of its group's answers
        rng = np.random.default_rng(request.seed)
        return tuple(map(int, lognormal(rng, (request.n,), mean=self.mean, limit=sampling.max_tokens)))

    def release(self) -> None:
        self.engine.release()


@dataclass(frozen=True)
class Checksum:
    """The work's prompts as a task; right answers are those that `is_right` says."""

    train: Sequence[Query]
    hard: float
    name: str = "checksum"
    heldout: Sequence[Query] = ()

    @property
    def judge(self) -> Judge:
        return PlainJudge(self._verdict)

    def _verdict(self, query: Query, completion: str) -> Verdict:
        assert isinstance(query.prompt, str)
        return Verdict(bool(is_right(query.prompt, completion, hard=self.hard, luck=LUCK)), "checksum")


def make_trainer(
    method: str,
    model: Any,
    tokenizer: Any,
    engine: Engine,
    work: Work,
    folder: Path,
    *,
    hard: float,
    mean: float,
    limit: int,
    tokens: int,
    learning_rate: float = 1e-6,
) -> Trainer:
    """r3's trainer whose every step asks all prompts of the work."""
    group = len(work.lengths[0])
    config = Config(
        method=MethodSettings(name=method),
        rollout=RolloutSettings(group_size=group, max_tokens=limit),
        train=TrainSettings(queries_per_step=len(work.prompts), epochs=1000, tokens_per_microbatch=tokens),
    )
    texts = [tokenizer.decode(prompt.tolist()) for prompt in work.prompts]
    task = Checksum([Query(f"q{number}", text) for number, text in enumerate(texts)], hard)
    forced = Forced(engine, work, mean)
    sampling = Sampling(max_tokens=limit, stop_tokens=())
    return Trainer(
        config,
        QueryStream(task.train, seed=0, epochs=1000),
        Sampler(forced, task, tokenizer, sampling, config.settled().reward, group),
        Algorithm(config.settled().method, SampleBuffer(folder / "buffer.sqlite"), tokenizer),
        make_updater(model, tokenizer, tokens, learning_rate),
    )
