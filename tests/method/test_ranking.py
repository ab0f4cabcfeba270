"""SERR against a brute-force oracle that follows the paper's sentences, loops and all; and the gate that pays for it.

Covers r3.method.ranking.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import r3
from r3.algorithm import Algorithm
from r3.buffer import SampleBuffer
from r3.method.mixed import StepResult
from r3.method.ranking import auc, predicts, structural_entropy_rewards, structure
from r3.method.settings import MethodSettings, RankingSettings
from r3.method.step import step
from r3.samples import Group, Sample
from tests.method.makers import BATCH, HISTORY, REFLECTION, make_group, make_sample
from tests.tokenizing import char_tokenizer

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


# `r3.method.ranking`: ranking rewards are paid only while their order is seen to tell who finishes right.


LIMIT = 8
FORKING, FLAT = [0.0, 0.0, 0.0, 3.0], [1.0, 1.0, 1.0, 2.0]
"""The first half of an answer, which is what the gate sees: the first dominates the second."""


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=2, max_size=30))
def test_the_standard_error_is_that_of_a_ratio_of_sums_over_groups(drawn: list[tuple[int, int]]) -> None:
    groups = [(min(half / 2, pairs), pairs) for half, pairs in drawn]
    share, error = auc(groups)
    assert share == pytest.approx(sum(ordered for ordered, _ in groups) / sum(pairs for _, pairs in groups))
    residuals = [ordered - share * pairs for ordered, pairs in groups]  # which add up to 0
    mean_pairs = statistics.fmean(pairs for _, pairs in groups)
    assert error == pytest.approx(statistics.stdev(residuals) / mean_pairs / math.sqrt(len(groups)), abs=1e-9)
    open_at = [predicts(groups, RankingSettings(auc_window=2, min_auc=m / 10)) for m in range(10)]
    assert open_at == sorted(open_at, reverse=True)  # a higher bar is never easier
    assert not predicts(groups, RankingSettings(auc_window=1 + sum(pairs for _, pairs in groups), min_auc=0))


@pytest.fixture
def buffer() -> Iterator[SampleBuffer]:
    with SampleBuffer(":memory:") as buffer:
        yield buffer


def algorithm(buffer: SampleBuffer, **ranking: Any) -> Algorithm:
    given = {"peak_fraction": 0.25, "gate": True, "auc_window": 4, "limit": LIMIT, **ranking}
    return Algorithm(MethodSettings.model_validate({"name": "r3", "ranking": given}), buffer, char_tokenizer())


def answer(number: int, start: Sequence[float], outcome: bool, *, step: int, query: str, **more: Any) -> Sample:
    length = 6 if outcome else LIMIT
    return make_sample(
        outcome,
        query_id=query,
        tokens=[number, step, *range(length - 2)],
        entropies=[*start, *[0.5] * (length - 4)],
        finish="stop" if outcome else "length",
        step=step,
        **more,
    )


def batch(step: int, *, predicts_right: bool) -> list[Group]:
    """A group that solved some, whose right answer the order tells or tells wrongly; and one that is to be ranked."""
    right, wrong = (FORKING, FLAT) if predicts_right else (FLAT, FORKING)
    solved = [answer(0, right, True, step=step, query="some"), answer(1, wrong, False, step=step, query="some")]
    stuck = [answer(2, FORKING, False, step=step, query="none"), answer(3, FLAT, False, step=step, query="none")]
    return [make_group(solved, query_id="some"), make_group(stuck, query_id="none")]


def paid(algorithm: Algorithm, steps: range, **kind: bool) -> list[bool]:
    return [algorithm.learn(batch(step, **kind), version=step).counts["ranking/groups"] == 1 for step in steps]


def test_nothing_is_paid_before_there_is_evidence_and_then_it_is(
    buffer: SampleBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="r3"):
        assert paid(algorithm(buffer), range(1, 7), predicts_right=True) == [False] * 4 + [True] * 2
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["ranking pauses", "ranking is paid"]


def test_an_order_that_predicts_nothing_is_not_paid(buffer: SampleBuffer) -> None:
    assert paid(algorithm(buffer), range(1, 9), predicts_right=False) == [False] * 8


def test_the_newest_pairs_decide_and_a_rewind_takes_them_back(
    buffer: SampleBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    followed = algorithm(buffer)
    assert paid(followed, range(1, 6), predicts_right=True)[-1]
    with caplog.at_level(logging.INFO, logger="r3"):
        later = paid(followed, range(6, 10), predicts_right=False)
    assert later == [True, False, False, False]  # one step's pairs come too late for itself
    assert caplog.records[-1].getMessage().startswith("ranking pauses: the AUC of its order is 0.75 ± 0.25 over")
    counts = followed.learn(batch(10, predicts_right=True), version=10).counts
    assert (counts["ranking/paused"], counts["ranking/gate_pairs"]) == (1.0, 4)
    buffer.forget_after(5)
    assert paid(algorithm(buffer), range(6, 10), predicts_right=False) == later


def test_without_the_gate_nothing_changes(buffer: SampleBuffer) -> None:
    free = algorithm(buffer, gate=False)
    result = free.learn(batch(1, predicts_right=False), version=1)
    assert result.counts["ranking/groups"] == 1
    assert "ranking/paused" not in result.counts
    assert buffer.late_pairs(4) == []
    assert paid(algorithm(buffer, enabled=False), range(2, 4), predicts_right=True) == [False, False]
    assert buffer.late_pairs(4) == []


def test_entropies_are_asked_for_where_the_gate_looks(buffer: SampleBuffer) -> None:
    """While it is closed those of late answers in groups that solved some, once it is open also of ranked ones."""

    def bare(group: Group) -> Group:
        samples = [dataclasses.replace(sample, entropies=None) for sample in group.samples]
        return make_group(samples, query_id=group.query.id, context=group.context)

    groups = [bare(group) for group in batch(9, predicts_right=True)]
    reflected = [make_sample(o, tokens=[7, *range(5)], context=REFLECTION, query_id="some") for o in (True, False)]
    groups.append(bare(make_group(reflected, query_id="some", context=REFLECTION)))
    assert algorithm(buffer).needs_entropies(groups) == [(0, 0), (0, 1)]
    paid(algorithm(buffer), range(1, 6), predicts_right=True)
    assert algorithm(buffer).needs_entropies(groups) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert algorithm(buffer, gate=False).needs_entropies(groups) == [(1, 0), (1, 1)]


def test_the_gate_needs_the_limit(buffer: SampleBuffer) -> None:
    with pytest.raises(ValueError, match=r"ranking\.gate needs ranking\.limit"):
        algorithm(buffer, limit=None).learn(batch(1, predicts_right=True), version=1)


# What becomes of ranking rewards in a step.


@given(BATCH, st.integers(0, 40), st.integers(1, 30))
def test_an_annealed_ranking_reward_falls_in_a_line_and_ends(batch: tuple[Group, ...], version: int, over: int) -> None:
    def paid(**ranking: Any) -> list[list[float]]:
        settings = MethodSettings(name="r3", replay=False, ranking={"centred": True, **ranking})
        found = step(batch, settings, policy_version=version).groups
        return [[s.reward_parts.get("ranking", 0.0) for s in mixed.fresh] for mixed in found]

    share = max(0.0, 1 - version / over)
    for whole, part in zip(paid(), paid(anneal_updates=over), strict=True):
        assert part == pytest.approx([share * reward for reward in whole], abs=1e-9)


@given(BATCH, HISTORY)
def test_ranking_rewards_alone_may_keep_their_own_size(
    batch: tuple[Group, ...], history: dict[str, list[Sample]]
) -> None:
    paper, own_size = MethodSettings(name="r3-paper"), {"standardised": False}
    whole = step(batch, paper, history=history, policy_version=20)
    own = step(batch, MethodSettings(name="r3-paper", ranking=own_size), history=history, policy_version=20)
    for one, other in zip(whole.groups, own.groups, strict=True):
        assert one.rewards == other.rewards
        if any(one.group.outcomes) or one.replayed or not one.ranked:
            assert one.advantages == other.advantages
        else:
            mean = statistics.fmean(other.rewards)
            assert other.advantages == pytest.approx([reward - mean for reward in other.rewards], abs=1e-9)
            assert max(map(abs, other.advantages)) <= MethodSettings().ranking.max_reward


@given(BATCH, HISTORY)
def test_ranking_rewards_may_be_kept_from_teaching_alone(
    batch: tuple[Group, ...], history: dict[str, list[Sample]]
) -> None:
    def result(**ranking: Any) -> StepResult:
        return step(batch, MethodSettings(name="r3-paper", ranking=ranking), history=history, policy_version=20)

    free, held, without = result(), result(alone=False), result(enabled=False)
    if without.weighted:  # something else teaches
        assert [mixed.advantages for mixed in held.groups] == [mixed.advantages for mixed in free.groups]
        assert [(w.advantage, w.weight) for w in held.weighted] == [(w.advantage, w.weight) for w in free.weighted]
    else:
        assert held.weighted == ()
        assert held.counts["groups/teaching"] == 0
    assert [mixed.rewards for mixed in held.groups] == [mixed.rewards for mixed in free.groups]
