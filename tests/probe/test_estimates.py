"""What a probe computes from counts, against oracles that count one by one, and intervals against a known truth.

Covers r3.probe.advice.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.method.ranking import dominance_scores, late_pairs, ordered_pairs, structure
from r3.probe import findings
from r3.probe.advice import LEAST_LIFT

SIMULATIONS = 200


@pytest.mark.parametrize("group", [2, 3, 4])
def test_chances_of_a_group_are_averages_over_all_ways_to_deal_the_answers(group: int) -> None:
    for right in range(2 * group + 1):
        answers = [True] * right + [False] * (2 * group - right)
        deals = [set(first) for first in combinations(range(2 * group), group)]
        firsts = [[answers[i] for i in deal] for deal in deals]
        seconds = [[answers[i] for i in range(2 * group) if i not in deal] for deal in deals]
        none = sum(not any(first) for first in firsts) / len(deals)
        every = sum(all(first) for first in firsts) / len(deals)
        replay = sum(any(a) and not any(b) for a, b in zip(firsts, seconds, strict=True)) / len(deals)
        assert findings.none_right(right, group) == pytest.approx(none)
        assert findings.all_right(right, group) == pytest.approx(every)
        assert findings.to_replay(right, group) == pytest.approx(replay)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30))
def test_pairs_in_order_are_the_area_under_the_roc_curve(answers: list[tuple[int, bool]]) -> None:
    in_order, pairs = ordered_pairs([score for score, _ in answers], [right for _, right in answers])
    positives = sum(right for _, right in answers)
    negatives = len(answers) - positives
    assert pairs == positives * negatives
    if not pairs:
        assert in_order == 0
        return
    # The curve from threshold to threshold, its area by trapezoids.
    points = [(0.0, 0.0)]
    for threshold in sorted({score for score, _ in answers}, reverse=True):
        taken = [right for score, right in answers if score >= threshold]
        points.append(((len(taken) - sum(taken)) / negatives, sum(taken) / positives))
    area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points))
    assert in_order / pairs == pytest.approx(area)


def test_the_order_at_half_the_limit_sees_nothing_of_what_came_later() -> None:
    explores, drifts, short = [3.0, 0, 0, 0], [1.0, 1, 1, 1], [9.0, 9]
    for rest in ([0.0], [50.0] * 4):
        rows = [np.array(row) for row in (explores + rest, drifts + rest, short)]
        assert late_pairs(rows, [True, False, True], limit=8, peak_fraction=0.25) == (1.0, 1)
        assert late_pairs(rows, [False, True, True], limit=8, peak_fraction=0.25) == (0.0, 1)
    stopped_at_half = [np.array(explores), np.array(drifts)]
    assert late_pairs(stopped_at_half, [True, False], limit=8, peak_fraction=0.25) == (0.0, 0)


def simulated(rate: float, spread: float, rng: np.random.Generator, tried: list[int]) -> list[int]:
    """Right answers to queries whose difficulties differ."""
    return list(rng.binomial(tried, rng.beta(rate * spread, (1 - rate) * spread, len(tried))))


def coverage(intervals: list[findings.Estimate], truth: float) -> float:
    return sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals)


TRIED = [16] * 30 + [8] * 20


def test_intervals_hold_a_known_lift() -> None:
    rng = np.random.default_rng(0)
    pairs = [(simulated(0.3, 4, rng, TRIED), simulated(0.06, 4, rng, TRIED)) for _ in range(SIMULATIONS)]
    ratios = [findings.ratio(a, b, TRIED, seed=0) for a, b in pairs]
    assert coverage(ratios, 5.0) >= 0.9
    assert np.median([ratio.value for ratio in ratios]) == pytest.approx(5, rel=0.1)


def test_no_lift_is_seldom_taken_for_one() -> None:
    """Equal chances on either side, mostly near nothing: the rule of `advice` on both."""
    rng = np.random.default_rng(1)
    taken = 0
    for _ in range(SIMULATIONS):
        chances = rng.beta(0.04, 1.96, len(TRIED))
        first, second = (list(rng.binomial(TRIED, chances)) for _ in range(2))
        ratio = findings.ratio(first, second, TRIED, seed=0)
        taken += ratio.low > 1 and ratio.value >= LEAST_LIFT
    assert taken <= 0.03 * SIMULATIONS


def test_two_sides_that_were_never_right_say_nothing_of_their_ratio() -> None:
    never = [0] * 20
    ratio = findings.ratio(never, never, [16] * 20, seed=0)
    assert ratio.value == 1
    assert ratio.low < 0.05
    assert ratio.high > 20


@pytest.mark.parametrize(("queries", "truth"), [(60, 0.7), (25, 0.5), (60, 0.03)])
def test_shares_hold_the_truth(queries: int, truth: float) -> None:
    """Queries differ in their share and in how many answers they have."""
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(SIMULATIONS):
        wholes = rng.integers(1, 20, queries)
        chances = rng.beta(truth * 6, (1 - truth) * 6, queries)
        shares.append(findings.share(list(rng.binomial(wholes, chances)), list(wholes)))
    assert coverage([share for share in shares if share is not None], truth) >= 0.92


@pytest.mark.parametrize("answers", [4, 12])
def test_an_order_that_is_noise_is_seldom_taken_for_information(answers: int) -> None:
    """SERR's scores of random entropies, many of them tied, in thirty queries."""
    rng = np.random.default_rng(3)
    above = below = 0
    for _ in range(SIMULATIONS):
        pairs = []
        for _ in range(30):
            peaks, wholes = structure(list(rng.random((answers, 12))), peak_fraction=0.25)
            pairs.append(ordered_pairs(dominance_scores(peaks, wholes), rng.random(answers) < 0.3))
        area = findings.share([in_order for in_order, _ in pairs], [of for _, of in pairs])
        assert area is not None
        above, below = above + (area.low > 0.5), below + (area.high < 0.5)
    assert above <= 0.05 * SIMULATIONS
    assert below <= 0.05 * SIMULATIONS


def test_shares_admit_too_few_queries() -> None:
    assert findings.share([], []) is None
    assert findings.share([0, 0], [0, 0]) is None
    few = findings.share([3, 3], [3, 3])
    assert few is not None
    assert (few.value, few.low, few.high) == (1.0, 0.0, 1.0)
    uneven = findings.share([500, *[0] * 11], [900, *[1] * 11])  # one query has nearly all of the pairs
    assert uneven is not None
    assert (uneven.low, uneven.high) == (0.0, 1.0)
    many = findings.share([3] * 8, [3] * 8)
    assert many is not None
    assert many.low < 0.8
    assert many.high == 1.0
