"""Which queries are asked again before their turn: those that are solved now and then teach most.

    weights: closest    Prompt Replay, arXiv 2603.21177: those within [min_rate, max_rate] in the order of |p − 1/2|,
                        then p, then how often they were asked again; a cooldown and a limit keep a few from ruling
    weights: gaussian   ExGRPO, arXiv 2510.02245: bucket k holds the queries with k right answers of n when last asked;
                        a bucket weighs exp(−(k − n/2)² / (2σ²)), and within one all are alike

A query can be asked again once it was solved by some answers and not by all when it was last asked. Its answers are
always fresh: what else is replayed with them is the matter of `replay` (`replay.when: revisited`).

Departures from the sources, and choices they leave open:
- The batch whose share of right answers first exceeds `start_at` is itself the first whose queries can be asked again.
- A query that this batch draws from the data already is not drawn once more.
- ExGRPO's buckets are drawn by a multinomial without putting back; what a bucket lacks goes to the others by the same
  weights. A query asked with another number of answers has its bucket at right − of/2.
- Solved queries stay in the data while fewer than a batch of others would be left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from r3.settings import Switchable


class RevisitSettings(Switchable):
    """Queries that were solved now and then are asked again before their turn (Prompt Replay, ExGRPO's pool)."""

    enabled: bool = False
    """Whether a part of each batch is made of queries that were asked before."""
    share: float = Field(0.5, gt=0, le=1)
    """At most this share of a batch; the rest comes from the data in its order."""
    weights: Literal["closest", "gaussian"] = "closest"
    """Those closest to a pass rate of one half first (Prompt Replay), or a draw in which a query weighs
    exp(−(right − n/2)²/(2σ²)) (ExGRPO)."""
    sigma: float = Field(1.0, gt=0)
    """σ of weights=gaussian, in answers."""
    min_rate: float = Field(0.0, ge=0, le=1)
    """Lowest pass rate, when it was last asked, of a query that is asked again (Prompt Replay: 0.24)."""
    max_rate: float = Field(1.0, ge=0, le=1)
    """Highest such rate (Prompt Replay: 0.7)."""
    cooldown: int = Field(0, ge=0)
    """Steps for which a query is left alone after it was asked (Prompt Replay: 5)."""
    jitter: float = Field(0.0, ge=0, lt=1)
    """The cooldown is up to this share shorter or longer, by a seeded draw (Prompt Replay: 0.2)."""
    max_reuse: int | None = Field(None, ge=1)
    """How often a query is asked again at most (Prompt Replay: 20); None for no limit."""
    start_at: float | None = Field(None, ge=0, lt=1)
    """Nothing is asked again before a batch's share of right answers has exceeded this (ExGRPO: 0.35)."""
    retire: bool = False
    """Queries that all answers solved are not asked again, from the next epoch on not in their turn either (ExGRPO)."""

    @model_validator(mode="after")
    def _rates_in_order(self) -> RevisitSettings:
        if self.min_rate > self.max_rate:
            raise ValueError(f"revisit.min_rate={self.min_rate:g} is above revisit.max_rate={self.max_rate:g}")
        return self


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a query that was asked."""

    right: int
    """Right answers when it was last asked, and how many answers there were."""
    of: int
    ready: int
    """The first step in which it may be asked again."""
    reused: int = 0
    """How often it was asked again."""

    @property
    def rate(self) -> float:
        return self.right / self.of


def candidates(seen: Mapping[str, Seen], settings: RevisitSettings, *, step: int) -> dict[str, Seen]:
    """The queries that may be asked again in this step."""
    return {
        name: query
        for name, query in seen.items()
        if 0 < query.right < query.of
        and settings.min_rate <= query.rate <= settings.max_rate
        and query.ready <= step
        and (settings.max_reuse is None or query.reused < settings.max_reuse)
    }


def choose(
    seen: Mapping[str, Seen],
    most: int,
    settings: RevisitSettings,
    *,
    step: int,
    rng: np.random.Generator,
    leave_out: Collection[str] = (),
) -> list[str]:
    """The queries to ask again, at most this many and no two alike.

    >>> seen = {f"{right}/8": Seen(right, 8, ready=0) for right in (2, 4, 5, 6)}
    >>> choose(seen, 4, RevisitSettings(min_rate=0.24, max_rate=0.7), step=1, rng=np.random.default_rng(0))
    ['4/8', '5/8', '2/8']
    """
    pool = {name: query for name, query in candidates(seen, settings, step=step).items() if name not in leave_out}
    if settings.weights == "closest":
        ordered = sorted(pool, key=lambda name: (abs(pool[name].rate - 0.5), pool[name].rate, pool[name].reused, name))
        return ordered[:most]
    buckets: dict[float, list[str]] = {}
    for name in sorted(pool):
        buckets.setdefault(pool[name].right - pool[name].of / 2, []).append(name)
    return _from_buckets(buckets, most, settings.sigma, rng)


def _from_buckets(buckets: dict[float, list[str]], most: int, sigma: float, rng: np.random.Generator) -> list[str]:
    left = {centre: [names[i] for i in rng.permutation(len(names))] for centre, names in sorted(buckets.items())}
    chosen: list[str] = []
    while left and len(chosen) < most:
        # Over the heaviest one, so that far buckets alone still have weights that a float can hold.
        logs = np.array([-(centre**2) / (2 * sigma**2) for centre in left])
        weights = np.exp(logs - logs.max())
        counts = rng.multinomial(most - len(chosen), weights / weights.sum())
        for centre, count in zip(list(left), counts.tolist(), strict=True):
            chosen += left[centre][:count]
            left[centre] = left[centre][count:]
        left = {centre: names for centre, names in left.items() if names}
    return chosen


def ready_again(step: int, settings: RevisitSettings, rng: np.random.Generator) -> int:
    """The first step in which a query may be asked again that is asked in this one."""
    jitter = rng.uniform(-settings.jitter, settings.jitter) if settings.jitter else 0.0
    return step + 1 + math.floor(settings.cooldown * (1 + jitter) + 0.5)
