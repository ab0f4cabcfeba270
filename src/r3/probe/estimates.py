"""From counts by query to numbers with intervals; pure functions.

Intervals resample queries, not answers: answers to the same query are alike. With 2G answers to a
query, c of them right, the chances of a group of G are exact averages over all ways to deal them into two groups, which
are steadier than the two groups as they happened to fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from r3.evaluate.intervals import wilson
from r3.evaluate.passk import Estimate, pass_at_k, student

Array = npt.NDArray[np.float64]
RESAMPLES = 5_000
FEWEST_QUERIES = 8
"""With fewer queries than this a share of pairs has no interval: a bootstrap would say too little."""


def none_right(right: int, group: int) -> float:
    """Chance that a group of G solves none, given how many of 2G answers are right.

    >>> none_right(1, 2), none_right(0, 2), none_right(3, 2)
    (0.5, 1.0, 0.0)
    """
    return 1.0 - pass_at_k(2 * group, right, group)


def all_right(right: int, group: int) -> float:
    """Chance that a group of G solves all, given the same.

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


def ratio(first: Sequence[int], second: Sequence[int], answers: Sequence[int], *, seed: int) -> Estimate:
    """How many times as often the first side is right, from the right answers per query on either side.

    Either side gets half a success more than it had, so that there is a ratio where one had none. A side that was
    never right would not vary when it is drawn again; its rate is drawn from Jeffreys' Beta(½, answers + ½) instead.
    """
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(answers), (RESAMPLES, len(answers)))
    answers_Q = np.asarray(answers, np.float64)
    drawn = answers_Q[draws].sum(1)

    def side(right: Sequence[int]) -> tuple[float, Array]:
        right_Q = np.asarray(right, np.float64)
        rate = (float(right_Q.sum()) + 0.5) / float(answers_Q.sum())
        if not right_Q.any():
            return rate, rng.beta(0.5, answers_Q.sum() + 0.5, RESAMPLES)
        return rate, (right_Q[draws].sum(1) + 0.5) / drawn

    (top, tops), (bottom, bottoms) = side(first), side(second)
    low, high = np.quantile(tops / np.maximum(bottoms, 1e-12), [0.025, 0.975])
    return Estimate(top / bottom, float(low), float(high))


def share(parts: Sequence[float], wholes: Sequence[float]) -> Estimate | None:
    """Σ parts / Σ wholes, with an interval over the queries that they belong to; None without any.

    Wilson's interval for as many independent answers as would have the ratio's standard error over queries, with
    Student's t in place of 1.96 (Korn and Graubard, 1998). Queries count by their weight (Kish): where a few hold most
    of the answers there are few. With fewer than `FEWEST_QUERIES` the interval is all of [0, 1].
    """
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole]
    if not pairs:
        return None
    part_Q, whole_Q = np.array(pairs, np.float64).T
    value = float(part_Q.sum() / whole_Q.sum())
    effective = float(whole_Q.sum() ** 2 / (whole_Q**2).sum())
    if effective < FEWEST_QUERIES:
        return Estimate(value, 0.0, 1.0)
    residual_Q = part_Q - value * whole_Q
    error = math.sqrt(effective / (effective - 1) * float((residual_Q**2).sum())) / float(whole_Q.sum())
    reach = student(round(effective) - 1, 0.975)
    if 0.0 < value < 1.0 and error == 0.0:  # every query has the same share
        return Estimate(value, value, value)
    answers = value * (1 - value) / error**2 if error else effective
    low, high = wilson(value * answers, answers, reach)
    return Estimate(value, min(low, value), max(high, value))


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, … and the last.

    >>> powers_up_to(8), powers_up_to(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({*(2**i for i in range(int(math.log2(most)) + 1)), most})
