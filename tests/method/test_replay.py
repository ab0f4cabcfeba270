"""CCR: what may join a group, and what never may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.method.replay import choose_replay, outcome_reward
from r3.method.settings import ReplaySettings
from r3.samples import Group, Joins, Sample
from tests.method.makers import REFLECTION, groups_of, make_group, make_sample, samples_of


@given(
    groups_of(),
    st.lists(samples_of() | samples_of(context=REFLECTION), max_size=12),
    st.integers(1, 5),
    st.none() | st.integers(0, 20),
    st.sampled_from(["newest", "random"]),
)
def test_only_young_history_of_the_opposite_outcome_and_at_most_k(
    group: Group, history: list[Sample], k: int, max_age: int | None, order: str
) -> None:
    settings = ReplaySettings(k=k, max_age=max_age, order=order)
    replay = choose_replay(group, history, settings, policy_version=20, rng=np.random.default_rng(0))
    assert len(replay.samples) <= k
    assert (replay.reason == "joined") == bool(replay.samples)
    for sample in replay.samples:
        assert sample.query_id == group.query.id
        assert any(sample is past for past in history)
        assert not any(sample.outcome == outcome for outcome in group.outcomes)
        assert max_age is None or 20 - sample.policy_version <= max_age
        assert sample.outcome or sample.context.kind == "plain"  # a failure in reflection is none of the plain policy's
    if group.context.kind == "reflection" or len(set(group.outcomes)) == 2:
        assert not replay.samples
    else:  # nothing that could have joined was left out for no reason
        fitting = [
            s
            for s in history
            if s.outcome is not group.outcomes[0] and (max_age is None or 20 - s.policy_version <= max_age)
            if s.outcome or s.context.kind == "plain"
        ]
        assert len(replay.samples) == min(k, len(fitting))
        texts = {s.tokens.tobytes() for s in fitting}
        assert len({s.tokens.tobytes() for s in replay.samples}) == min(k, len(texts))


@given(groups_of("a"), samples_of("b"))
def test_history_of_another_query_is_refused(group: Group, stranger: Sample) -> None:
    settings = ReplaySettings()
    if choose_replay(group, [], settings, policy_version=0).reason == "no_history":
        with pytest.raises(ValueError, match="holds a sample of query 'b'"):
            choose_replay(group, [stranger], settings, policy_version=0)


def test_newest_first_and_distinct_before_repeated() -> None:
    group = make_group([make_sample(False)] * 4)
    history = [
        make_sample(True, tokens=[1, 1], policy_version=9, id=5),
        make_sample(True, tokens=[1, 1], policy_version=8, id=4),
        make_sample(True, tokens=[2, 2], policy_version=7, id=3),
        make_sample(True, tokens=[3, 3], policy_version=6, id=2),
    ]
    chosen = choose_replay(group, history[::-1], ReplaySettings(k=2), policy_version=9).samples
    assert [s.id for s in chosen] == [5, 3]
    filled = choose_replay(group, history, ReplaySettings(k=4), policy_version=9).samples
    assert [s.id for s in filled] == [5, 3, 2, 4]  # the repeated text comes last


def test_random_order_is_seeded_and_reaches_all() -> None:
    group = make_group([make_sample(False)] * 4)
    history = [make_sample(True, tokens=[i], id=i) for i in range(6)]
    settings = ReplaySettings(k=1, order="random")
    picks = [
        choose_replay(group, history, settings, policy_version=0, rng=np.random.default_rng(seed)).samples[0].id
        for seed in range(60)
    ]
    again = [
        choose_replay(group, history, settings, policy_version=0, rng=np.random.default_rng(seed)).samples[0].id
        for seed in range(60)
    ]
    assert picks == again
    assert set(picks) == set(range(6))


@pytest.mark.parametrize(
    ("group", "history", "settings", "reason"),
    [
        (make_group([make_sample(False)]), [make_sample(True)], ReplaySettings(enabled=False), "off"),
        (make_group([make_sample(False), make_sample(True)]), [make_sample(True)], ReplaySettings(), "mixed"),
        (
            make_group([make_sample(False, context=REFLECTION)], context=REFLECTION),
            [make_sample(True)],
            ReplaySettings(),
            "reflection",
        ),
        (make_group([make_sample(False)]), [make_sample(False)], ReplaySettings(), "no_history"),
        (make_group([make_sample(True)]), [], ReplaySettings(), "no_history"),
        (make_group([make_sample(False)]), [make_sample(True)], ReplaySettings(max_age=4), "too_old"),
        (make_group([make_sample(True)]), [make_sample(False)], ReplaySettings(max_age=5), "joined"),
        (make_group([make_sample(True)]), [make_sample(False, context=REFLECTION)], ReplaySettings(), "no_history"),
        (make_group([make_sample(False)]), [make_sample(True, context=REFLECTION)], ReplaySettings(), "joined"),
        (make_group([make_sample(True)]), [make_sample(False)], ReplaySettings(failures=False), "off"),
        (make_group([make_sample(False)]), [make_sample(True)], ReplaySettings(failures=False), "joined"),
    ],
)
def test_it_says_why(group: Group, history: list[Sample], settings: ReplaySettings, reason: str) -> None:
    assert choose_replay(group, history, settings, policy_version=5).reason == reason


def test_homogeneity_is_decided_on_outcome_not_reward() -> None:
    # Right answers of different lengths have different rewards; the group is solve-all all the same.
    group = make_group([make_sample(True, reward=1.9), make_sample(True, reward=1.1)])
    assert choose_replay(group, [make_sample(False)], ReplaySettings(), policy_version=0).reason == "joined"


def test_a_replayed_failure_leaves_its_old_ranking_reward_behind() -> None:
    ranked = make_sample(False, reward=0.08, reward_parts={"ranking": 0.08}, finish="length")
    assert outcome_reward(ranked) == 0.0
    assert outcome_reward(make_sample(True, reward=1.5, reward_parts={"correct": 1.0, "length": 0.5})) == 1.5


def test_unverified_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="verify it first"):
        choose_replay(make_group([make_sample(None)]), [], ReplaySettings(), policy_version=0)


@given(st.lists(samples_of(outcome=True), min_size=1, max_size=8), st.integers(1, 5))
def test_without_distinct_the_newest_join_repeated_or_not(history: list[Sample], k: int) -> None:
    group = make_group([make_sample(False)] * 3)
    settings = ReplaySettings(k=k, distinct=False)
    chosen = choose_replay(group, history, settings, policy_version=20).samples
    versions = sorted((s.policy_version for s in history), reverse=True)
    assert [s.policy_version for s in chosen] == versions[:k]


@given(
    st.lists(samples_of("q", True), min_size=1, max_size=10),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=10, max_size=10),
    st.booleans(),
)
def test_no_text_joins_more_often_than_it_may(
    history: list[Sample], k: int, most: int, before: list[int], distinct: bool
) -> None:
    joins = {sample.fingerprint: Joins(n, None) for sample, n in zip(history, before, strict=False) if n}
    settings = ReplaySettings(k=k, max_repeats=most, distinct=distinct)
    replay = choose_replay(make_group([make_sample(False)] * 2), history, settings, policy_version=20, joins=joins)
    texts = [sample.tokens.tobytes() for sample in history]
    room = {
        text: max(
            0,
            most
            - max(
                (joins[s.fingerprint].times for s in history if s.tokens.tobytes() == text and s.fingerprint in joins),
                default=0,
            ),
        )
        for text in texts
    }
    joined = [sample.tokens.tobytes() for sample in replay.samples]
    assert all(joined.count(text) <= room[text] for text in texts)
    assert len(joined) == min(k, sum(min(room[text], texts.count(text)) for text in set(texts)))
    assert replay.reason == ("joined" if joined else "used_up")
