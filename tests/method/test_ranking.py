"""SERR against a brute-force oracle that follows the paper's sentences, loops and all."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import r3
from r3.method.ranking import structural_entropy_rewards, structure

# Few distinct values and short lists, so that ties of peak, global and score are common.
ENTROPIES = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]) | st.floats(0, 8, width=32), min_size=1, max_size=12),
    max_size=10,
)
FRACTION = st.sampled_from([0.05, 0.1, 0.2, 0.25, 0.5, 1.0])


def oracle(entropies: list[list[float]], p: float, r_max: float) -> list[float]:
    """Sort, count, and average over every rank a tied sample could have had, in exact arithmetic."""
    n = len(entropies)
    if n < 2:
        return [0.0] * n
    peaks, means = [], []
    for h in entropies:
        exact = sorted((Fraction(x) for x in h), reverse=True)
        k = max(1, math.floor(p * len(h)))
        peaks.append(sum(exact[:k]) / k)
        means.append(sum(exact) / len(exact))
    scores = [sum(peaks[i] > peaks[j] and means[i] < means[j] for j in range(n)) for i in range(n)]
    ranking = sorted(scores, reverse=True)
    rewards = []
    for score in scores:
        ranks = [rank for rank, other in enumerate(ranking) if other == score]
        rewards.append(float(sum(r_max * (1 - rank / (n - 1)) for rank in ranks) / len(ranks)))
    return rewards


@given(ENTROPIES, FRACTION, st.floats(0, 1))
def test_agrees_with_brute_force(entropies: list[list[float]], p: float, r_max: float) -> None:
    got = structural_entropy_rewards(entropies, peak_fraction=p, max_reward=r_max)
    assert got == pytest.approx(oracle(entropies, p, r_max), abs=1e-9)


@given(st.data(), ENTROPIES, FRACTION)
def test_permuting_samples_permutes_rewards_ties_included(
    data: st.DataObject, entropies: list[list[float]], p: float
) -> None:
    order = data.draw(st.permutations(range(len(entropies))))
    straight = structural_entropy_rewards(entropies, peak_fraction=p, max_reward=0.5)
    permuted = structural_entropy_rewards([entropies[i] for i in order], peak_fraction=p, max_reward=0.5)
    assert permuted == [straight[i] for i in order]


@given(ENTROPIES, FRACTION)
def test_rewards_are_within_bounds_and_average_to_half(entropies: list[list[float]], p: float) -> None:
    rewards = structural_entropy_rewards(entropies, peak_fraction=p, max_reward=0.5)
    assert all(0 <= r <= 0.5 for r in rewards)
    if len(rewards) > 1:  # ranks are shared out, none is lost
        assert sum(rewards) == pytest.approx(0.25 * len(rewards))


def test_one_sample_gets_nothing() -> None:
    assert structural_entropy_rewards([[1.0, 2.0]], peak_fraction=0.5, max_reward=0.5) == [0.0]
    assert structural_entropy_rewards([], peak_fraction=0.5, max_reward=0.5) == []


def test_all_tied_are_equal() -> None:
    rewards = structural_entropy_rewards([[1.0, 2.0]] * 5, peak_fraction=0.5, max_reward=0.5)
    assert rewards == [0.25] * 5


def test_peak_takes_at_least_one_token_and_floors() -> None:
    peaks, means = structure([[1.0, 5.0, 3.0]], peak_fraction=0.2)
    assert peaks.tolist() == [5.0]
    assert means.tolist() == [3.0]
    peaks, _ = structure([[1.0, 5.0, 3.0, 4.0, 0.0]], peak_fraction=0.59)  # ⌊2.95⌋ = 2
    assert peaks.tolist() == [4.5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_float_type_gives_the_same_order(dtype: type[np.floating]) -> None:
    arrays = [np.array([0, 0, 0, 3], dtype), np.array([1, 1, 1, 2], dtype), np.array([2, 2, 2, 2], dtype)]
    got = structural_entropy_rewards(arrays, peak_fraction=0.25, max_reward=1.0)
    assert got == pytest.approx([1.0, 0.25, 0.25])  # the first dominates both; the others dominate none


@pytest.mark.parametrize(
    ("entropies", "options", "message"),
    [
        ([[1.0], []], {}, "non-empty"),
        ([[1.0], [float("nan")]], {}, r"entropies\[1\] holds NaN"),
        ([[1.0], [2.0]], {"peak_fraction": 0.0}, "peak_fraction"),
        ([[1.0], [2.0]], {"peak_fraction": 1.5}, "peak_fraction"),
        ([[1.0], [2.0]], {"max_reward": -1.0}, "max_reward"),
    ],
)
def test_bad_input_is_named(entropies: list[list[float]], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structural_entropy_rewards(entropies, **{"peak_fraction": 0.5, "max_reward": 0.5, **options})


def test_it_is_public() -> None:
    assert r3.structural_entropy_rewards is structural_entropy_rewards
