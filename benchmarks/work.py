"""The work that engines are compared on: the same prompts, and for every response the same length, fixed by a seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from r3.rollout import Request, Sampling
from shapes import EOS, SHAPES

SPREAD = 0.7
"""Standard deviation of the logarithm of a length: at a mean of 2,500, one response in fifty reaches 8,192."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how long each response to each of them is."""

    prompts: tuple[npt.NDArray[np.int32], ...]
    lengths: tuple[tuple[int, ...], ...]
    seed: int

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    @property
    def context(self) -> int:
        """Longest prompt with the longest response."""
        return max(map(len, self.prompts)) + self.longest

    def shortened(self, limit: int) -> Work:
        """The same prompts, no response longer than the limit."""
        return replace(self, lengths=tuple(tuple(min(length, limit) for length in row) for row in self.lengths))

    def flat(self) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
        """Every response on its own: its prompt and its length."""
        for prompt, lengths in zip(self.prompts, self.lengths, strict=True):
            for length in lengths:
                yield prompt, length

    def requests(self) -> list[Request]:
        """As r3's engines take it: a request a prompt, each response under its own limit."""
        return [
            Request(prompt, len(lengths), seed=self.seed + place, limits=lengths)
            for place, (prompt, lengths) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]

    def sampling(self) -> Sampling:
        """No token ends a response: its limit does."""
        return Sampling(max_tokens=self.longest, stop_tokens=())

    def describe(self) -> str:
        rows = sum(map(len, self.lengths))
        return f"{len(self.prompts)} prompts, {rows} responses, {self.tokens:,} tokens, longest {self.longest:,}"


def uniform(rows: int, context: int, new: int, *, vocabulary: int, seed: int) -> Work:
    """As many different prompts as rows, all of one length, each answered once by `new` tokens."""
    rng = np.random.default_rng(seed)
    return Work(tuple(_prompt(rng, context, vocabulary) for _ in range(rows)), ((new,),) * rows, seed)


def ragged(prompts: int, group: int, *, mean: float, limit: int, vocabulary: int, seed: int) -> Work:
    """Prompts of 150 to 300 tokens, each answered `group` times at log-normal lengths, cut at the limit."""
    rng = np.random.default_rng(seed)
    made = tuple(_prompt(rng, int(rng.integers(150, 301)), vocabulary) for _ in range(prompts))
    lengths = tuple(tuple(map(int, row)) for row in lognormal(rng, (prompts, group), mean=mean, limit=limit))
    return Work(made, lengths, seed)


def ragged_of(options: argparse.Namespace, seed: int) -> Work:
    """Ragged work as the command line asks for it."""
    return ragged(
        options.prompts,
        options.group,
        mean=options.mean,
        limit=options.limit,
        vocabulary=SHAPES[options.shape].vocabulary,
        seed=seed,
    )


def lognormal(rng: np.random.Generator, size: tuple[int, ...], *, mean: float, limit: int) -> npt.NDArray[np.int64]:
    """Lengths whose mean, before the limit cuts them, is `mean`."""
    drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, size)
    return np.clip(np.rint(drawn), 1, limit).astype(np.int64)


def _prompt(rng: np.random.Generator, length: int, vocabulary: int) -> npt.NDArray[np.int32]:
    return rng.integers(EOS + 1, vocabulary, length, dtype=np.int32)
