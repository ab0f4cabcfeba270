"""Eq. 1, Eq. 3 and their variants, against formulas written out here and against exact laws."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import r3
from r3.method.advantage import group_advantages

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=24)


def eq_1(rewards: list[float], eps: float) -> list[float]:
    """GRPO's advantage with the standard library's statistics, exact rational arithmetic inside."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(r - mean) / (std + eps) for r in rewards]


@given(REWARDS)
def test_eq_3_with_alpha_1_equals_eq_1(rewards: list[float]) -> None:
    got = group_advantages(rewards, alpha=1.0, eps=1e-6)
    assert got == pytest.approx(eq_1(rewards, 1e-6), rel=1e-6, abs=1e-6)


@given(REWARDS, st.floats(0.1, 10), st.floats(1e-8, 1.0))
def test_eq_3_formula(rewards: list[float], alpha: float, eps: float) -> None:
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(r - mean) / (alpha * std + eps) for r in rewards]
    assert group_advantages(rewards, alpha=alpha, eps=eps) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 64))
def test_equal_rewards_give_exactly_zero(reward: float, n: int) -> None:
    for options in ({}, {"eps": 0.0}, {"scale": "none"}, {"baseline": "leave_one_out"}):
        assert group_advantages([reward] * n, **options) == [0.0] * n


def test_a_third_thrice_is_zero_though_its_mean_rounds() -> None:
    rewards = [0.1] * 3  # sum([0.1] * 3) / 3 != 0.1 in floating point
    assert group_advantages(rewards, eps=0.0) == [0.0, 0.0, 0.0]


@given(st.data(), REWARDS)
def test_permuting_rewards_permutes_advantages_to_the_bit(data: st.DataObject, rewards: list[float]) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    straight = group_advantages(rewards)
    assert group_advantages([rewards[i] for i in order]) == [straight[i] for i in order]


@pytest.mark.parametrize("n", [2, 5, 17, 64])
def test_a_lone_success_gets_root_n_minus_1(n: int) -> None:
    assert group_advantages([1.0] + [0.0] * (n - 1), eps=0.0)[0] == pytest.approx(math.sqrt(n - 1))


@given(REWARDS)
def test_leave_one_out_is_the_distance_to_the_others(rewards: list[float]) -> None:
    got = group_advantages(rewards, scale="none", baseline="leave_one_out")
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS, st.floats(0.01, 2))
def test_cap_bounds_and_keeps_the_rest(rewards: list[float], cap: float) -> None:
    free = group_advantages(rewards)
    for limited, unlimited in zip(group_advantages(rewards, cap=cap), free, strict=True):
        assert limited == max(-cap, min(cap, unlimited))


def test_one_sample_has_no_advantage() -> None:
    assert group_advantages([3.0]) == [0.0]
    assert group_advantages([]) == []


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([1.0, float("nan")], {}, "finite"),
        ([1.0, 0.0], {"scale": "max"}, "scale must be"),
        ([1.0, 0.0], {"baseline": "median"}, "baseline must be"),
        ([1.0, 0.0], {"alpha": 0.0}, "alpha"),
        ([1.0, 0.0], {"cap": -1.0}, "cap"),
    ],
)
def test_bad_input_is_named(rewards: list[float], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **options)  # type: ignore[arg-type]


def test_it_is_public() -> None:
    assert r3.group_advantages is group_advantages
