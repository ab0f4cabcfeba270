"""pass@k and majority against exhaustive enumeration; intervals against simulated benchmarks whose truth is known."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.evaluate.passk import estimate, majority, pass_at_k, wilson

outcomes = st.lists(st.booleans(), min_size=1, max_size=9)


@given(outcomes, st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    subsets = list(itertools.combinations(answers, k))
    share = Fraction(sum(map(any, subsets)), len(subsets))
    assert pass_at_k(len(answers), sum(answers), k) == float(share)


@given(st.integers(1, 1024), st.data())
def test_large_counts_lose_no_precision(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    miss = Fraction(1)
    for drawn in range(k):  # one draw after the other: the chance that it is wrong, given that all before were
        miss *= Fraction(max(0, n - right - drawn), n - drawn)
    assert pass_at_k(n, right, k) == pytest.approx(float(1 - miss), rel=1e-15, abs=0)


def test_pass_at_1_is_the_mean() -> None:
    assert [pass_at_k(16, right, 1) for right in (0, 1, 8, 16)] == [0, 1 / 16, 0.5, 1]


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be|needs at least"):
        pass_at_k(n, right, k)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6))
def test_majority_is_the_mean_over_all_orders_of_the_first_commonest_answer(answers: list[str | None]) -> None:
    def first_commonest(order: tuple[str | None, ...]) -> str | None:
        given = [answer for answer in order if answer is not None]
        return Counter(given).most_common(1)[0][0] if given else None  # ties go to the one met first

    orders = list(itertools.permutations(answers))
    expected = sum(first_commonest(order) == "a" for order in orders) / len(orders)
    assert majority([(answer, answer == "a") for answer in answers]) == pytest.approx(expected)


def simulated(rng: np.random.Generator, problems: int, samples: int, a: float, b: float) -> list[float]:
    """pass@1 of each problem of a benchmark whose difficulties are Beta(a, b): the truth is a / (a + b)."""
    return list(rng.binomial(samples, rng.beta(a, b, problems)) / samples)


def coverage(problems: int, a: float, b: float, *, trials: int) -> float:
    """How often the 95 % interval of a simulated benchmark holds the truth."""
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(trials):
        found = estimate(simulated(rng, problems, 16, a, b), seed=trial, resamples=800)
        covered += found.low <= a / (a + b) <= found.high
    return covered / trials


@pytest.mark.parametrize(("problems", "a", "b"), [(30, 0.3, 0.7), (40, 2, 2), (200, 0.3, 0.7)])
def test_intervals_cover_at_the_stated_rate(problems: int, a: float, b: float) -> None:
    trials, level = 800, 0.95
    assert abs(coverage(problems, a, b, trials=trials) - level) < 3 * math.sqrt(level * (1 - level) / trials)


def test_few_and_mostly_unsolved_problems_cost_at_most_a_point_of_coverage() -> None:
    """The skew of thirty such problems is more than the correction takes back: 94.2 ± 0.3 % in 5,500 trials."""
    trials, level = 800, 0.94
    assert coverage(30, 0.3, 3, trials=trials) > level - 3 * math.sqrt(level * (1 - level) / trials)


def test_the_interval_of_the_mean_over_benchmarks_covers_too() -> None:
    rng, trials, level = np.random.default_rng(11), 600, 0.9
    truth = (0.3 + 0.5 + 0.75) / 3
    covered = 0
    for trial in range(trials):
        marks = [simulated(rng, size, 4, *shape) for size, shape in ((30, (0.3, 0.7)), (40, (1, 1)), (120, (1.5, 0.5)))]
        found = estimate(*marks, seed=trial, level=level, resamples=600)
        covered += found.low <= truth <= found.high
    assert abs(covered / trials - level) < 3 * math.sqrt(level * (1 - level) / trials)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12), st.integers(0, 3))
def test_intervals_hold_the_value_and_stay_within_the_scores(scores: list[float], seed: int) -> None:
    found = estimate(scores, seed=seed, resamples=200)
    assert 0 <= found.low <= found.high <= 1
    assert found.value == pytest.approx(sum(scores) / len(scores))
    assert found == estimate(scores, seed=seed, resamples=200)


def test_equal_scores_do_not_mean_certainty() -> None:
    none = estimate([0.0] * 30, seed=0)
    assert (none.value, none.low, none.high) == (0, *wilson(0, 30))
    assert none.high > 0.1


def test_a_benchmark_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="without problems"):
        estimate([0.5], [], seed=0)
