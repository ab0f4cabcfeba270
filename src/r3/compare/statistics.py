"""Statistics for a handful of seeds: curves on one grid, intervals, tokens to reach an accuracy, paired tests.

Variants with the same seed share the order of queries, the held-out problems and the random numbers of the evaluation,
so differences are taken seed by seed (paired). All seeds are asked the same held-out problems. Where a comparison has
the results of each problem, its intervals are over seeds and problems; older ones have accuracies alone, and intervals
over seeds only, which leave out that other problems would have given other numbers.

- Interval of a mean over n seeds: Student's t with n − 1 degrees of freedom. With m problems, the variance of the mean
  is s²/n + q²/m, s² and q² those of the seeds' and the problems' means. What belongs to both is counted twice, so the
  interval is rather too wide.
- Paired difference: the same on the differences, and the exact sign-flip test over seeds. With n seeds its p cannot be
  below 2 / 2ⁿ: 0.25 for three, 0.0625 for five. So with five seeds or fewer it cannot reject at 5 %, however clear the
  case; the t test that belongs to the interval can, at the price of taking the differences for normal.
- Several comparisons: Holm's step-down correction of their p-values, which makes the chance of any false rejection
  among them at most that of one test. It takes nothing for granted about how they depend on each other.
- Tokens to reach: where the mean curve over seeds first reaches a level, by straight lines between its evaluations. A
  ratio's interval is the percentile bootstrap, both methods resampled with the same seeds and the same problems; every
  possible draw is taken where there are few. With few seeds such intervals are too narrow.

The curves are not smoothed. A moving average needs a rule for its ends: one that looks back reads the final level
late and favours the faster method (a true 0.50 came out as 0.45 with five evaluations), and one that fits a line bends
with the curve. Both methods are charged for where they first are at the level, so noise moves both to earlier tokens.
What remains, by simulation (tests/compare/test_statistics.py), for a true ratio of 0.5 and 5, 9 or 17 evaluations:

- straight lines: none without noise. If each evaluation of the mean curve is off by a tenth of the baseline's whole
  rise, the median estimate is 0.51, 0.52 and 0.53; by a twentieth, 0.50, 0.50 and 0.51;
- curves, without noise, since the evaluations are joined by straight lines: 0.53, 0.51 and 0.50 where the baseline
  saturates, 0.57, 0.53 and 0.51 on a steep sigmoid;
- two methods alike, with that noise, on any of these curves: one needs fewer tokens for the other's final value in 40
  to 46 of 100 cases, more or all there are in the others. Where it never reaches that value, take the inverse of the
  ratio with their parts swapped: the median is then 0.99 to 1.00.

So the remaining error makes a faster method look slower, not faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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


def mean_interval(values: Sequence[float] | Array) -> Estimate:
    """Mean with its 95 % interval, of one value per seed or of [seeds, problems]. With one seed the interval is NaN.

    >>> mean = mean_interval([0.1, 0.2, 0.3])
    >>> round(mean.value, 3), round(mean.low, 3), round(mean.high, 3)
    (0.2, -0.048, 0.448)
    """
    table = np.asarray(values, np.float64)
    table = table.reshape(len(table), -1)
    seeds = len(table)
    mean = float(table.mean())
    if seeds < 2:
        return Estimate(mean, math.nan, math.nan)
    half = student(seeds - 1) * _standard_error(table)
    return Estimate(mean, mean - half, mean + half)


def _standard_error(table: Array) -> float:
    """Half-width of the interval of the mean of [seeds, problems], with two seeds or more."""
    seeds, problems = table.shape
    variance = float(table.mean(axis=1).var(ddof=1)) / seeds
    if problems > 1:
        variance += float(table.mean(axis=0).var(ddof=1)) / problems
    return math.sqrt(variance)


def student_p(t: float, freedom: int) -> float:
    """Two-sided p of Student's t, by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4).

    >>> round(student_p(2.365, 7), 3), round(student_p(12.706, 1), 3)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle), math.cos(angle)) if odd else (1.0, 1.0)
    if freedom == 1:
        total = 0.0
    for step in range(1, (freedom - odd) // 2):
        term *= squared * (2 * step - 1 + odd) / (2 * step + odd)
        total += term
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - within))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of p-values, in the order given: reject those that are at most the level.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    corrected = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Differences of two variants over the seeds that both have."""

    seeds: int
    difference: Estimate
    p_sign_flip: float
    """Two-sided, exact."""
    p_least: float
    """The smallest value that it could have with this number of seeds."""
    p_t: float
    """Two-sided, of the t test that belongs to the difference's interval; NaN for one seed."""


def paired_test(ours: Sequence[float] | Array, theirs: Sequence[float] | Array) -> PairedTest:
    """ours − theirs, seed by seed, and problem by problem where they are [seeds, problems].

    >>> round(paired_test([3, 4, 5], [1, 1, 1]).p_sign_flip, 3)
    0.25
    """
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    n = len(differences)
    by_seed = differences.reshape(n, -1).mean(axis=1)
    return PairedTest(n, mean_interval(differences), sign_flip_p(by_seed), min(1.0, 2.0 / 2**n), _t_test_p(differences))


def _t_test_p(differences: Array) -> float:
    table = differences.reshape(len(differences), -1)
    if len(table) < 2:
        return math.nan
    mean, error = float(table.mean()), _standard_error(table)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return student_p(mean / error, len(table) - 1)


def sign_flip_p(differences: Array) -> float:
    """Share of all sign patterns whose mean is at least as far from 0 as the observed one."""
    seen = abs(float(differences.sum()))
    scale = float(np.abs(differences).sum()) * 1e-12  # sums in another order differ by rounding
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=differences.size)))
    return float(np.mean(np.abs(signs @ differences) >= seen - scale))


def on_grid(tokens: Sequence[float], values: Sequence[float], grid: Sequence[float]) -> Array:
    """A curve's values at the grid's token counts, by linear interpolation between evaluations."""
    return np.interp(np.asarray(grid, np.float64), np.asarray(tokens, np.float64), np.asarray(values, np.float64))


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
    """The baseline's final accuracy, the mean over seeds."""
    tokens: float
    ratio: Estimate
    """Infinity: not reached within the budget. NaN: the baseline never rose above its start."""


def token_ratio(grid: Sequence[float], ours: Array, baseline: Array, *, seed: int = 0) -> TokenRatio:
    """From the curves of both over the same seeds, [seeds, grid] or [seeds, problems, grid], with a bootstrap interval
    over seeds, and over problems where there are any."""
    # Seeds first, then problems: a draw of each is a choice of rows and of columns, the same for both methods.
    ours, baseline = (curves.reshape(len(curves), -1, len(grid)) for curves in (ours, baseline))
    seeds, problems = ours.shape[:2]
    level, needed, base = _reached(grid, ours.mean(axis=(0, 1)), baseline.mean(axis=(0, 1)))
    value = _divided(needed, base)
    if seeds < 2 or math.isnan(value):
        return TokenRatio(level, needed, Estimate(value, math.nan, math.nan))
    ratios = []
    for seeds_drawn, problems_drawn in _draws(seeds, problems, seed):
        means = (np.einsum("s,p,spg->g", seeds_drawn, problems_drawn, curves) for curves in (ours, baseline))
        ratios.append(_divided(*_reached(grid, *means)[1:]))
    known = [ratio for ratio in ratios if not math.isnan(ratio)] or [value]
    # Without interpolation between draws: infinity has no mean.
    low, high = (float(np.quantile(known, q, method="inverted_cdf")) for q in (0.025, 0.975))
    return TokenRatio(level, needed, Estimate(value, low, high))


def _reached(grid: Sequence[float], ours: Array, baseline: Array) -> tuple[float, float, float]:
    level = float(baseline[-1])
    return level, tokens_to_reach(grid, ours, level), tokens_to_reach(grid, baseline, level)


def _divided(needed: float, base: float) -> float:
    return needed / base if base > 0 else math.nan


def _draws(seeds: int, problems: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """Weights of seeds and of problems, drawn with replacement: every possible draw if only seeds are drawn and there
    are few, else a seeded sample."""
    if problems == 1 and seeds**seeds <= DRAWS:
        for draw in itertools.product(range(seeds), repeat=seeds):
            yield np.bincount(draw, minlength=seeds) / seeds, np.ones(1)
        return
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS):
        yield (
            rng.multinomial(seeds, [1 / seeds] * seeds) / seeds,
            rng.multinomial(problems, [1 / problems] * problems) / problems,
        )
