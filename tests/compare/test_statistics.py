"""The statistics of a comparison against oracles of their own: tables, brute force, simulated curves.

The ratio of tokens also on curves whose true ratio is known: straight, bending and noisy ones, and with no difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.compare.statistics import (
    Array,
    holm,
    mean_interval,
    on_grid,
    paired_test,
    sign_flip_p,
    student,
    student_p,
    token_ratio,
    tokens_to_reach,
)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (4, 2.776), (15, 2.131), (30, 2.042), (120, 1.980)]
)
def test_students_quantiles_are_the_printed_tables(freedom: int, value: float) -> None:
    assert student(freedom) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (2.365, 7, 0.05), (5.408, 7, 0.001), (2.228, 10, 0.05),
     (3.707, 6, 0.01), (1.960, 100_000, 0.05), (0.0, 5, 1.0)],
)  # fmt: skip
def test_p_of_students_t_is_that_of_the_printed_tables(t: float, freedom: int, p: float) -> None:
    assert student_p(t, freedom) == pytest.approx(p, rel=2e-3)
    assert student_p(-t, freedom) == student_p(t, freedom)


@given(st.floats(-30, 30), st.integers(1, 40))
def test_p_of_students_t_is_the_area_beyond_it(t: float, freedom: int) -> None:
    """Against Simpson's rule over the density, after the substitution x = √n · tan u, which bounds the range."""
    u = np.linspace(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2, 4_001)
    whole = np.linspace(0, math.pi / 2, 4_001)

    def area(points: np.ndarray) -> float:
        heights = np.cos(points) ** (freedom - 1)
        weights = np.where(np.arange(len(points)) % 2, 4.0, 2.0)
        weights[[0, -1]] = 1
        return float((weights * heights).sum() * (points[1] - points[0]) / 3)

    assert student_p(t, freedom) == pytest.approx(area(u) / area(whole), abs=1e-9)


def test_the_paired_t_test_is_that_of_the_textbook_and_belongs_to_the_interval() -> None:
    """Student's sleep data: ten patients under two drugs; t = 4.0621, p = 0.00283."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_test(second, first).p_t == pytest.approx(0.00283, abs=1e-5)
    assert math.isnan(paired_test([1.0], [0.0]).p_t)
    assert paired_test([1.0, 2.0], [1.0, 2.0]).p_t == 1
    rng = np.random.default_rng(0)
    for _ in range(50):
        ours, theirs = rng.normal(0.2, 0.2, (2, 6, 16))
        found = paired_test(ours, theirs)
        assert (found.p_t < 0.05) == (found.difference.low > 0 or found.difference.high < 0)


def test_holms_correction_of_known_cases() -> None:
    assert holm([]) == []
    assert holm([0.03]) == [0.03]
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])  # R: p.adjust
    assert holm([0.9, 0.5, 0.001]) == pytest.approx([1.0, 1.0, 0.003])


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: list[float], level: float) -> None:
    rejected = set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        if p_values[place] * (len(p_values) - rank) > level:
            break
        rejected.add(place)
    assert {place for place, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    rng = random.Random(0)
    draws = [[rng.gauss(0.3, 0.1) for _ in range(4)] for _ in range(2_000)]
    covered = sum((found := mean_interval(values)).low <= 0.3 <= found.high for values in draws)
    assert 0.935 <= covered / 2_000 <= 0.965


@pytest.mark.parametrize("difficulty", [0.0, 0.2])
def test_an_interval_over_problems_covers_what_other_problems_would_give(difficulty: float) -> None:
    """Problems differ in difficulty, seeds in luck: only an interval over both covers the mean over all problems."""
    rng, covered, over_seeds = np.random.default_rng(1), 0, 0
    for _ in range(600):
        problems = rng.normal(0.4, difficulty, 64)
        table = problems + rng.normal(0, 0.02, (6, 1)) + rng.normal(0, 0.1, (6, 64))
        covered += (found := mean_interval(table)).low <= 0.4 <= found.high
        over_seeds += (found := mean_interval(table.mean(axis=1))).low <= 0.4 <= found.high
    assert covered / 600 >= 0.94  # rather too wide than too narrow
    assert (over_seeds / 600 < 0.8) == (difficulty > 0)


def test_problems_widen_the_ratios_interval_and_leave_its_value() -> None:
    """Two thirds of the problems rise twice as fast with ours, the others not: which are asked decides the ratio."""
    x, rng = np.linspace(0, 1, 6), np.random.default_rng(0)
    fast = np.arange(12) % 3 > 0
    seeds = rng.normal(0.1, 0.005, (8, 1, 1))
    base = 0.1 + seeds * x * np.ones((8, 12, 1))
    ours = 0.1 + seeds * x * np.where(fast, 2.0, 1.0)[None, :, None]
    by_problem = token_ratio(x.tolist(), ours, base).ratio
    by_seed = token_ratio(x.tolist(), ours.mean(axis=1), base.mean(axis=1)).ratio
    assert by_problem.value == pytest.approx(by_seed.value) == pytest.approx(0.6)
    assert by_seed.high - by_seed.low < 0.01 < 0.1 < by_problem.high - by_problem.low
    paired = paired_test(ours[:, :, -1], base[:, :, -1])
    assert paired.difference.low < paired_test(ours.mean(axis=1)[:, -1], base.mean(axis=1)[:, -1]).difference.low


def test_one_seed_has_no_interval() -> None:
    found = mean_interval([0.4])
    assert found.value == 0.4
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=7))
def test_the_sign_flip_test_counts_sign_patterns(differences: list[int]) -> None:
    patterns = list(product((1, -1), repeat=len(differences)))
    seen = abs(sum(differences))
    extreme = sum(abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= seen for signs in patterns)
    assert sign_flip_p(np.array(differences, float) / 7) == pytest.approx(float(Fraction(extreme, len(patterns))))


def test_five_seeds_cannot_reject_at_five_per_cent_by_sign_flips() -> None:
    found = paired_test([0.9] * 5, [0.1, 0.11, 0.12, 0.13, 0.14])
    assert found.p_sign_flip == found.p_least == 2 / 32
    assert found.difference.low > 0  # the t interval can


def test_curves_are_interpolated() -> None:
    assert on_grid([0, 10, 30], [0.0, 1.0, 2.0], [0, 5, 20, 30]).tolist() == [0.0, 0.5, 1.5, 2.0]


def test_tokens_to_reach_is_the_first_crossing() -> None:
    grid, curve = [0, 100, 200, 300], np.array([0.1, 0.3, 0.2, 0.5])
    assert tokens_to_reach(grid, curve, 0.2) == pytest.approx(50)
    assert tokens_to_reach(grid, curve, 0.4) == pytest.approx(200 + 100 * 0.2 / 0.3)
    assert tokens_to_reach(grid, curve, 0.05) == 0
    assert tokens_to_reach(grid, curve, 0.6) == math.inf


def test_a_method_that_is_twice_as_fast_has_a_ratio_of_a_half() -> None:
    grid = list(range(0, 2_001, 10))
    slow = np.array([[0.1 + 0.2 * x / 2_000 + shift for x in grid] for shift in (0.0, 0.01, -0.02)])
    fast = np.array([[0.1 + 0.4 * x / 2_000 + shift for x in grid] for shift in (0.0, 0.01, -0.02)])
    found = token_ratio(grid, fast, slow)
    assert found.ratio.value == pytest.approx(0.5, abs=0.01)
    assert found.ratio.low == pytest.approx(0.5, abs=0.01)  # paired: the shifts are common to both
    assert found.ratio.high == pytest.approx(0.5, abs=0.01)


def test_what_is_never_reached_is_infinite_and_what_never_rose_is_unknown() -> None:
    grid = [0, 100, 200, 300]
    rising, flat = np.array([[0.1, 0.2, 0.3, 0.4]] * 3), np.array([[0.1, 0.1, 0.1, 0.1]] * 3)
    assert token_ratio(grid, flat, rising).ratio.value == math.inf
    assert math.isnan(token_ratio(grid, rising, flat).ratio.value)


def test_the_ratios_interval_widens_with_the_spread_between_seeds() -> None:
    grid = list(range(0, 1_001, 100))
    base = np.array([[0.1 + 0.2 * x / 1_000 for x in grid]] * 4)
    rng = np.random.default_rng(0)
    widths = []
    for spread in (0.01, 0.1):
        ours = np.array([[0.1 + (0.3 + spread * rng.normal()) * x / 1_000 for x in grid] for _ in range(4)])
        found = token_ratio(grid, ours, base).ratio
        assert found.low <= found.value <= found.high
        widths.append(found.high - found.low)
    assert widths[0] < widths[1]


# The ratio of tokens on curves whose true ratio is known.

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
