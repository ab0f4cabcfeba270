"""What a handful of seeds can say: curves on one grid, intervals over seeds, tokens to reach, paired tests.

Seeds are the unit. Variants with the same seed share the order of queries, the held-out problems and the random numbers
of the evaluation, so differences are taken seed by seed (paired).

- Interval of a mean over n seeds: Student's t with n − 1 degrees of freedom.
- Paired difference: the same on the differences, and the exact sign-flip test. With n seeds its p cannot be below
  2 / 2ⁿ: 0.25 for three, 0.0625 for five. So with five seeds or fewer it cannot reject at 5 %, however clear the case;
  the t interval can, at the price of taking the differences for normal. Neither corrects for several comparisons.
- Tokens to reach: where the mean curve over seeds (smoothed by a moving average of three evaluations) first reaches a
  level, by linear interpolation. A ratio's interval is the percentile bootstrap over seeds, both methods drawn with the
  same seeds; every possible draw is taken where there are few. With few seeds such intervals are too narrow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from r3.evaluate.passk import Estimate

Array = npt.NDArray[np.float64]
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom."""
DRAWS = 4_000


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t; beyond the table by its expansion around the normal's."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean over seeds with its 95 % t interval; one seed has none, and says so with NaN.

    >>> found = mean_interval([0.1, 0.2, 0.3])
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
    (0.2, -0.048, 0.448)
    """
    numbers = np.asarray(values, np.float64)
    mean = float(numbers.mean())
    if numbers.size < 2:
        return Estimate(mean, math.nan, math.nan)
    half = student(numbers.size - 1) * float(numbers.std(ddof=1)) / math.sqrt(numbers.size)
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Differences of two variants over the seeds that both have."""

    seeds: int
    difference: Estimate
    p_sign_flip: float
    """Two-sided, exact."""
    p_least: float
    """The smallest value that it could have taken with so many seeds."""


def paired_test(ours: Sequence[float], theirs: Sequence[float]) -> PairedTest:
    """ours − theirs, seed by seed.

    >>> round(paired_test([3, 4, 5], [1, 1, 1]).p_sign_flip, 3)
    0.25
    """
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    n = differences.size
    return PairedTest(n, mean_interval(differences.tolist()), sign_flip_p(differences), min(1.0, 2.0 / 2**n))


def sign_flip_p(differences: Array) -> float:
    """Share of all sign patterns whose mean is at least as far from 0 as the one seen."""
    seen = abs(float(differences.sum()))
    scale = float(np.abs(differences).sum()) * 1e-12  # sums in another order differ by rounding
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=differences.size)))
    return float(np.mean(np.abs(signs @ differences) >= seen - scale))


def on_grid(tokens: Sequence[float], values: Sequence[float], grid: Sequence[float]) -> Array:
    """A curve's values at the grid's token counts, by linear interpolation between evaluations."""
    return np.interp(np.asarray(grid, np.float64), np.asarray(tokens, np.float64), np.asarray(values, np.float64))


def smoothed(values: Array) -> Array:
    """Moving average of three points, of two at either end.

    >>> smoothed(np.array([0.0, 3.0, 3.0, 6.0])).tolist()
    [1.5, 2.0, 4.0, 4.5]
    """
    padded = np.concatenate([[math.nan], values, [math.nan]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3)
    return np.asarray(np.nanmean(windows, axis=1), np.float64)


def tokens_to_reach(grid: Sequence[float], values: Array, level: float) -> float:
    """Tokens at which the curve first reaches the level; infinity if it never does.

    >>> tokens_to_reach([0, 10, 20], np.array([0.0, 0.4, 0.2]), 0.2)
    5.0
    """
    at = np.flatnonzero(values >= level)
    if at.size == 0:
        return math.inf
    first = int(at[0])
    if first == 0:
        return float(grid[0])
    (x0, x1), (y0, y1) = grid[first - 1 : first + 1], values[first - 1 : first + 1]
    return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """Tokens that a variant needs for the baseline's final accuracy, as a share of what the baseline itself needs."""

    level: float
    """The baseline's final accuracy, on its smoothed mean curve."""
    tokens: float
    baseline_tokens: float
    ratio: Estimate
    """Infinity: not reached within the budget. NaN: the baseline never rose above its start, so there is nothing to
    reach."""


def token_ratio(grid: Sequence[float], ours: Array, baseline: Array, *, seed: int = 0) -> TokenRatio:
    """From the curves of both over the same seeds [seeds, grid], with a bootstrap interval over seeds."""
    seeds = len(ours)
    level, own, base = _reached(grid, ours, baseline, np.arange(seeds))
    ratios = [_divided(*_reached(grid, ours, baseline, draw)[1:]) for draw in _draws(seeds, seed)]
    known = np.sort([ratio for ratio in ratios if not math.isnan(ratio)])
    value = _divided(own, base)
    if known.size < 2 or seeds < 2 or math.isnan(value):
        return TokenRatio(level, own, base, Estimate(value, math.nan, math.nan))
    # Without interpolation between draws: infinity has no mean.
    low, high = (float(np.quantile(known, q, method="inverted_cdf")) for q in (0.025, 0.975))
    return TokenRatio(level, own, base, Estimate(value, low, high))


def _reached(
    grid: Sequence[float], ours: Array, baseline: Array, seeds: npt.NDArray[np.int64]
) -> tuple[float, float, float]:
    mine, theirs = (smoothed(curves[seeds].mean(axis=0)) for curves in (ours, baseline))
    level = float(theirs[-1])
    return level, tokens_to_reach(grid, mine, level), tokens_to_reach(grid, theirs, level)


def _divided(own: float, base: float) -> float:
    return own / base if base > 0 else math.nan


def _draws(seeds: int, seed: int) -> Sequence[npt.NDArray[np.int64]]:
    """Every way to draw so many seeds with putting back, or a seeded choice of them where there are too many."""
    if seeds**seeds <= DRAWS:
        return [np.array(draw) for draw in itertools.product(range(seeds), repeat=seeds)]
    return list(np.random.default_rng(seed).integers(0, seeds, (DRAWS, seeds)))
