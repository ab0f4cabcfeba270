"""r3's own side of the GPU benchmarks: a random policy, samples of given work, a rule for right answers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from r3.method.mixed import WeightedSample
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.policy.model import Policy, enable_checkpointing
from r3.policy.optimiser import Optimiser
from r3.policy.settings import ModelSettings
from r3.policy.update import Updater
from r3.samples import Group, Query, Sample
from r3.train.settings import TrainSettings
from work import Work


def is_right(prompt: str, completion: str, *, hard: float = 0.0, luck: float = 0.0) -> float:
    """1 or 0 by the texts' checksum, so that every system judges alike: a share `hard` of the prompts is solved in a
    share `luck` of all tries, the others in half of them."""
    is_hard = zlib.crc32(prompt.encode()) % 1000 < 1000 * hard
    return float(zlib.crc32((prompt + completion).encode()) % 1000 < 1000 * (luck if is_hard else 0.5))


def make_updater(model: Any, tokenizer: Any, tokens: int, learning_rate: float = 1e-6) -> Updater:
    """The update over a model: AdamW with float32 masters, gradient checkpointing, packed micro-batches."""
    settings = ModelSettings(path="random", gradient_checkpointing=True)
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
