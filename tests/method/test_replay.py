"""CCR: what may join a group and what never may; RePO, RLEP and ExGRPO by their papers' examples and formulas."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.method.mixed import StepResult
from r3.method.objective import policy_loss
from r3.method.replay import choose_replay, outcome_reward
from r3.method.settings import MethodSettings, ReplaySettings
from r3.method.step import step
from r3.policy.update import token_batch
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


# RePO, RLEP and ExGRPO: worked examples of their papers, and a naive loss from their formulas.


LIMIT = 20


def settings_of(name: str, **more: Any) -> MethodSettings:
    return MethodSettings.model_validate({"name": name, "objective": {"constant_length": LIMIT}, **more})


def answers(outcomes: list[int], *, past: bool = False, seed: int = 0) -> list[Sample]:
    """Answers of random lengths, log-probs and entropies, all of different texts."""
    rng = np.random.default_rng([seed, past])
    made = []
    for i, right in enumerate(outcomes):
        n = int(rng.integers(1, LIMIT))
        logprobs, entropies = -rng.exponential(1.0, n), rng.exponential(1.0, n)
        tokens = np.concatenate([[i + 100 * past], rng.integers(0, 50, n - 1)])
        ids = {"id": i + 1, "policy_version": i} if past else {"policy_version": 50}
        made.append(Sample("q", tokens, logprobs, entropies, outcome=bool(right), reward=float(right), **ids))
    return made


def stepped(name: str, fresh: list[Sample], past: list[Sample], **more: Any) -> StepResult:
    groups = [make_group(fresh, revisited=True)]
    return step(groups, settings_of(name, **more), history={"q": past}, policy_version=50)


# ------------------------------------------------------------- worked examples


def test_repo_compares_past_answers_with_each_other() -> None:
    """3 right and 5 wrong: 1.2074 and −0.7244 with the sample's standard deviation, √(8/7) times ours."""
    past = answers([1, 1, 1] + [0] * 13, past=True)
    mixed = stepped("repo", answers([0] * 8), past).groups[0]
    assert (mixed.replay, len(mixed.replayed)) == ("joined", 8)
    assert mixed.advantages[:8] == (0.0,) * 8
    assert [a / math.sqrt(8 / 7) for a in mixed.advantages[8:]] == pytest.approx([1.2074] * 3 + [-0.7244] * 5, abs=3e-4)
    assert [s.outcome for s in mixed.replayed] == [True] * 3 + [False] * 5  # the highest reward first
    assert stepped("repo", answers([0] * 8), past[:15]).groups[0].replay == "too_few"


def test_repo_may_take_those_whose_rewards_vary_most() -> None:
    """The worked example: k = 4 of [1, 1, 0, 0, 0, 1] are two right and two wrong ones, here the newest of each."""
    past = answers([1, 1, 0, 0, 0, 1], past=True)
    more = {"order": "max_variance", "k": 4, "min_history": 1}
    mixed = stepped("repo", answers([0] * 8), past, replay=more).groups[0]
    assert [s.id for s in mixed.replayed] == [6, 2, 5, 4]
    assert mixed.advantages[8:] == pytest.approx([1, 1, -1, -1], abs=1e-4)
    alike = stepped("repo", answers([0] * 8), answers([0] * 6, past=True), replay=more).groups[0]
    assert len(alike.replayed) == 4


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25]), min_size=1, max_size=8),
    texts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    k=st.integers(1, 8),
    distinct=st.booleans(),
)
def test_no_other_choice_of_past_answers_varies_more(
    rewards: list[float], texts: list[int], k: int, distinct: bool
) -> None:
    past = [
        Sample("q", [texts[i]], [-1.0], outcome=reward > 0, reward=reward, id=i + 1)
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    settings = ReplaySettings(when="always", order="max_variance", k=k, distinct=distinct, candidates=8)
    chosen = choose_replay(make_group(answers([0, 1])), past, settings, policy_version=1).samples
    assert len(chosen) == len({s.id for s in chosen}) == min(k, len(past))
    if distinct and len(set(texts[: len(past)])) >= k:
        assert len({s.tokens.tobytes() for s in chosen}) == k
    if not distinct:
        best = max(statistics.pvariance(pick) for pick in itertools.combinations(rewards, len(chosen)))
        assert statistics.pvariance([s.reward for s in chosen]) == pytest.approx(best)


def test_rlep_adds_two_successes_to_every_group() -> None:
    past = answers([1] * 6 + [0] * 6, past=True)
    mixed = stepped("rlep", answers([0] * 16), past).groups[0]
    assert mixed.advantages == pytest.approx([-0.3536] * 16 + [2.8284] * 2, abs=1e-4)
    for outcomes in ([1] * 4, [0, 1, 1, 0]):
        joined = stepped("rlep", answers(outcomes), past).groups[0].replayed
        assert [s.outcome for s in joined] == [True, True]
    assert stepped("rlep", answers([0] * 4), past[6:]).groups[0].replay == "no_history"


def test_exgrpo_puts_its_surest_success_in_the_place_of_a_fresh_answer() -> None:
    past = answers([1, 1, 1, 0], past=True)
    result = stepped("exgrpo", answers([0] * 8), past)
    mixed = result.groups[0]
    assert mixed.advantages == pytest.approx([-0.125] * 7 + [0.0, 0.875])
    assert mixed.members[7].left_out
    surest = min(past[:3], key=lambda s: statistics.fmean(s.entropies.tolist()))  # type: ignore[union-attr]
    assert mixed.replayed == (surest,)
    assert len(result.samples) == 8  # the one whose place was taken is stored like the others
    weights = {w.weight for w in result.weighted}
    assert weights == {1 / (8 * LIMIT)}


def test_exgrpo_leaves_queries_alone_that_come_in_their_turn() -> None:
    past = answers([1, 1, 1, 0], past=True)
    (mixed,) = step([make_group(answers([0] * 8))], settings_of("exgrpo"), history={"q": past}).groups
    assert (mixed.replay, mixed.replayed) == ("off", ())
    with pytest.raises(ValidationError, match="set revisit=on or another"):
        settings_of("r3", replay={"when": "revisited"})


# ------------------------------------------------------------- gradients against a naive loss


def standardised(outcomes: list[bool | None]) -> list[float]:
    values = [float(bool(o)) for o in outcomes]
    return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-6) for v in values] if values else []


def ppo(ratio: torch.Tensor, a: float, low: float, high: float, dual: float | None) -> torch.Tensor:
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return torch.minimum(loss, torch.tensor(-dual * a)) if dual is not None and a < 0 else loss


def naive(name: str, fresh: list[Sample], past: list[Sample], now: dict[int, torch.Tensor]) -> torch.Tensor:
    """The loss of one group, of those that are trained on."""
    rows = [*fresh, *past]
    total = torch.zeros((), requires_grad=True).clone()
    tokens = sum(len(s) for s in rows)
    if name == "repo":
        a = standardised([s.outcome for s in fresh]) + standardised([s.outcome for s in past])
    elif name == "rlep":
        a = standardised([s.outcome for s in rows])
    else:
        values = [float(bool(s.outcome)) for s in rows]
        a = [v - statistics.fmean(values) for v in values]
    for i, sample in enumerate(rows):
        log_p = now[id(sample)]
        r = (log_p - torch.tensor(sample.logprobs)).exp()
        if name == "repo":
            total = total + ppo(r, a[i], 0.2, 0.2, None).mean() / len(rows)
        elif name == "rlep":
            r = (log_p - log_p.detach()).exp() if i >= len(fresh) else r  # computed again: 1
            total = total + ppo(r, a[i], 0.2, 0.28, 10.0).sum() / tokens
        else:
            shaped = r / (r + 0.1) if i >= len(fresh) else r
            total = total - (a[i] * shaped).sum() / (len(rows) * LIMIT)
    return total


OUTCOMES = st.lists(st.integers(0, 1), min_size=2, max_size=6)


@pytest.mark.parametrize("name", ["repo", "rlep", "exgrpo"])
@given(fresh=OUTCOMES, past=st.lists(st.integers(0, 1), min_size=0, max_size=20), seed=st.integers(0, 1000))
def test_gradients_are_those_of_a_naive_loss(name: str, fresh: list[int], past: list[int], seed: int) -> None:
    drawn, before = answers(fresh, seed=seed), answers(past, past=True, seed=seed)
    result = stepped(name, drawn, before)
    joined = list(result.groups[0].replayed)
    right = sum(past)
    if name == "repo":
        assert len(joined) == (8 if len(past) >= 16 else 0)
    else:
        assert len(joined) == min(right, 2 if name == "rlep" else 1)
    trained = drawn[: len(drawn) - len(joined)] if name == "exgrpo" else drawn
    rng = np.random.default_rng(seed)
    now = {id(s): torch.tensor(s.logprobs + rng.normal(0, 0.6, len(s)), requires_grad=True) for s in [*drawn, *joined]}
    naive(name, trained, joined, now).backward()
    got: dict[int, torch.Tensor] = {}
    if result.weighted:
        logprobs = torch.cat([now[id(w.sample)].detach() for w in result.weighted]).float().requires_grad_()
        batch = token_batch(result.weighted, torch.device("cpu"))
        policy_loss(logprobs, batch, settings_of(name).objective).loss.backward()
        assert logprobs.grad is not None
        parts = logprobs.grad.split([len(w.sample) for w in result.weighted])
        got = {id(w.sample): part for w, part in zip(result.weighted, parts, strict=True)}
    for key, values in now.items():
        expected = torch.zeros(len(values)) if values.grad is None else values.grad
        ours = got.get(key, torch.zeros(len(values)))
        assert torch.allclose(ours.double(), expected.double(), atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("when", "expected"), [("homogeneous", [1, 0, 1]), ("solve_none", [1, 0, 0]), ("always", [2, 2, 2])]
)
def test_which_groups_replay(when: str, expected: list[int]) -> None:
    past = [answers([1, 0], past=True)[i] for i in (0, 1)]
    settings = {"when": when, "k": 2}
    joined = [
        len(stepped("r3-no-ranking", answers(fresh), past, replay=settings).groups[0].replayed)
        for fresh in ([0, 0], [0, 1], [1, 1])
    ]
    assert joined == expected


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, said in (
        ({"baseline": "split"}, "set replay.when=always"),
        ({"baseline": "split", "when": "always", "failures": False}, "replay.failures=true"),
        ({"min_history": 9}, "raise replay.candidates"),
    ):
        with pytest.raises(ValidationError, match=said):
            MethodSettings.model_validate({"name": "r3", "replay": settings})
    assert not MethodSettings.model_validate({"name": "grpo", "replay": {"min_history": 9}}).replay.enabled


def test_lowest_entropy_needs_entropies() -> None:
    bare = [Sample("q", [1, 2], [-1.0, -1.0], outcome=True, reward=1.0, id=1)]
    with pytest.raises(ValueError, match="lowest_entropy needs entropies"):
        stepped("exgrpo", answers([0, 0]), bare)


def test_the_last_fresh_answer_is_never_replaced() -> None:
    mixed = stepped("exgrpo", answers([0]), answers([1, 1], past=True)).groups[0]
    assert not any(member.left_out for member in mixed.members)
    assert mixed.advantages == (-0.5, 0.5)
