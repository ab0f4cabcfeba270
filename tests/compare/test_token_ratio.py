"""The ratio of tokens on curves whose true ratio is known: straight, bending and noisy ones, and with no difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from r3.compare.statistics import Array, token_ratio

RATIOS = (0.3, 0.5, 0.8, 1.0)


def straight(x: Array) -> Array:
    return 0.02 + 0.1 * x


def saturating(x: Array) -> Array:
    return 0.02 + 0.1 * (1 - np.exp(-3 * x)) / (1 - math.exp(-3))


def sigmoid(x: Array) -> Array:
    def s(x: Array | float) -> Array | float:
        return 1 / (1 + np.exp(-10 * (np.asarray(x) - 0.6)))

    return np.asarray(0.02 + 0.1 * (s(x) - s(0.0)) / (s(1.0) - s(0.0)))


def measured(curve: Callable[[Array], Array], true: float, evaluations: int, budget: int = 240_000) -> float:
    """The point estimate where the variant is the baseline with `true` times its tokens."""
    grid = np.linspace(0, budget, evaluations + 1)
    found = token_ratio(grid.tolist(), curve(grid / budget / true)[None], curve(grid / budget)[None])
    return found.ratio.value


@pytest.mark.parametrize("true", RATIOS)
@pytest.mark.parametrize("evaluations", [5, 9, 17])
@pytest.mark.parametrize("budget", [900, 240_000, 3_200_000])
def test_on_straight_lines_the_ratio_is_exact(true: float, evaluations: int, budget: int) -> None:
    assert measured(straight, true, evaluations, budget) == pytest.approx(true, abs=1e-9)


@pytest.mark.parametrize("true", RATIOS)
@pytest.mark.parametrize(
    ("curve", "evaluations", "most"),
    [
        (saturating, 5, 0.05), (saturating, 9, 0.02), (saturating, 17, 0.01),
        (sigmoid, 5, 0.10), (sigmoid, 9, 0.03), (sigmoid, 17, 0.01),
    ],
)  # fmt: skip
def test_on_curves_it_errs_by_little_and_against_the_faster_method(
    curve: Callable[[Array], Array], evaluations: int, most: float, true: float
) -> None:
    error = measured(curve, true, evaluations) - true
    assert -1e-9 <= error <= most


def noisy_pairs(
    curve: Callable[[Array], Array], true: float, evaluations: int, spread: float, pairs: int
) -> list[tuple[Array, Array]]:
    """Mean curves of two methods, each evaluation off by `spread` of the baseline's whole rise of 0.1."""
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, evaluations + 1)
    noise = 0.1 * spread * rng.standard_normal((pairs, 2, evaluations + 1))
    return [(curve(x / true) + ours, curve(x) + theirs) for ours, theirs in noise]


def ratios(pairs: Sequence[tuple[Array, Array]]) -> Array:
    grid = np.linspace(0, 1, len(pairs[0][0])).tolist()
    return np.array([token_ratio(grid, ours[None], theirs[None]).ratio.value for ours, theirs in pairs])


@pytest.mark.parametrize("curve", [straight, saturating, sigmoid])
@pytest.mark.parametrize("evaluations", [5, 9, 17])
def test_without_a_difference_it_favours_neither_method(curve: Callable[[Array], Array], evaluations: int) -> None:
    pairs = noisy_pairs(curve, 1.0, evaluations, 0.1, 2_000)
    ours, swapped = ratios(pairs), ratios([(theirs, ours) for ours, theirs in pairs])
    assert np.mean(ours < 1) == pytest.approx(np.mean(swapped < 1), abs=0.04)
    assert np.mean(ours < 1) <= 0.53  # never sooner than by chance
    # One that does not reach the other's final value is measured by the other, which reaches its.
    both = np.where(np.isinf(ours), 1 / swapped, ours)
    both = both[np.isfinite(both) & (both > 0)]
    assert np.mean(np.log(both)) == pytest.approx(0, abs=0.04)
    assert np.median(both) == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("evaluations", [5, 9, 17])
def test_noise_moves_the_ratio_little_and_against_the_faster_method(evaluations: int) -> None:
    for spread, most in ((0.05, 0.015), (0.1, 0.035)):
        median = float(np.median(ratios(noisy_pairs(straight, 0.5, evaluations, spread, 1_000))))
        assert -0.005 <= median - 0.5 <= most
