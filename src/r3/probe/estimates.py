"""From counts by query to numbers with intervals; pure functions.

Queries are what is drawn again in every interval, not answers: answers to one query are alike. With 2G answers to a
query, c of them right, the chances of a group of G are exact averages over all ways to deal them into two groups, which
are steadier than the two groups as they happened to fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from r3.evaluate.intervals import wilson
from r3.evaluate.passk import Estimate, estimate, pass_at_k

Array = npt.NDArray[np.float64]
RESAMPLES = 5_000
FEWEST_QUERIES = 8
"""A share of pairs has no interval below so many queries: a bootstrap over fewer says too little."""


def none_right(right: int, group: int) -> float:
    """Chance that a group solves none, from 2G answers of which so many are right.

    >>> none_right(1, 2), none_right(0, 2), none_right(3, 2)
    (0.5, 1.0, 0.0)
    """
    return 1.0 - pass_at_k(2 * group, right, group)


def all_right(right: int, group: int) -> float:
    """Chance that a group solves all.

    >>> all_right(3, 2), all_right(4, 2)
    (0.5, 1.0)
    """
    return none_right(2 * group - right, group)


def to_replay(right: int, group: int) -> float:
    """Chance that a second group solves none and the first has a success that could join it.

    >>> to_replay(0, 2), to_replay(1, 2), round(to_replay(2, 2), 3)
    (0.0, 0.5, 0.167)
    """
    return none_right(right, group) if right else 0.0


def difference(first: Sequence[float], second: Sequence[float], *, seed: int) -> Estimate:
    """Mean of first − second over queries, each a rate from 0 to 1."""
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    if not any(gaps):  # nothing to draw again: as unsure as one arm that saw nothing at all
        _, high = wilson(0, len(gaps))
        return Estimate(0.0, -high, high)
    halved = estimate([(1 + gap) / 2 for gap in gaps], seed=seed)
    return Estimate(*(2 * x - 1 for x in (halved.value, halved.low, halved.high)))


def ratio(first: Sequence[float], second: Sequence[float], answers: int, *, seed: int) -> Estimate:
    """How many times as often the first is right, each a query's rate; `answers` were drawn for each side in all.

    Either side gets half a success more than it had, so that there is a ratio where one had none. A side that was
    never right would not vary when it is drawn again; its rate is drawn from Jeffreys' Beta(½, answers + ½) instead.
    """
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(first), (RESAMPLES, len(first)))

    def side(rates: Sequence[float]) -> tuple[float, Array]:
        rates_Q = np.asarray(rates, np.float64)
        if not rates_Q.any():
            return 0.5 / answers, rng.beta(0.5, answers + 0.5, RESAMPLES)
        return float(rates_Q.mean()) + 0.5 / answers, rates_Q[draws].mean(1) + 0.5 / answers

    (top, tops), (bottom, bottoms) = side(first), side(second)
    low, high = np.quantile(tops / np.maximum(bottoms, 1e-12), [0.025, 0.975])
    return Estimate(top / bottom, float(low), float(high))


def share(parts: Sequence[float], wholes: Sequence[float], *, seed: int) -> Estimate | None:
    """Σ parts / Σ wholes, with an interval over the queries that they belong to; None without any.

    With fewer queries than `FEWEST_QUERIES` the interval is all of [0, 1].
    """
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole]
    if not pairs:
        return None
    part_Q, whole_Q = np.array(pairs, np.float64).T
    value = float(part_Q.sum() / whole_Q.sum())
    if len(pairs) < FEWEST_QUERIES:
        return Estimate(value, 0.0, 1.0)
    if value in (0.0, 1.0):  # nothing to draw again
        low, high = wilson(round(value * len(pairs)), len(pairs))
        return Estimate(value, min(low, value), max(high, value))
    draws = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = np.quantile(part_Q[draws].sum(1) / whole_Q[draws].sum(1), [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, … and the last.

    >>> powers_up_to(8), powers_up_to(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({*(2**i for i in range(int(math.log2(most)) + 1)), most})
