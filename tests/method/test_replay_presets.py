"""RePO, RLEP and ExGRPO: worked examples of their papers, and a naive loss from their formulas."""

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
from r3.method.replay import choose_replay
from r3.method.settings import MethodSettings, ReplaySettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import Sample
from tests.method.makers import make_group

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


@pytest.mark.parametrize(("x", "value", "slope"), [
    (0.01, 0.0909, 8.264), (0.1, 0.5, 2.5), (0.5, 0.8333, 0.2778), (1.0, 0.9091, 0.0826), (2.0, 0.9524, 0.0227),
])  # fmt: skip
def test_exgrpos_shaping(x: float, value: float, slope: float) -> None:
    """f(x) = x/(x + β) and its slope, read off the loss of one replayed token."""
    from r3.method.mixed import WeightedSample

    sample = Sample("q", [1], [-3.0], outcome=True, reward=1.0)
    weighted = WeightedSample(np.array([7], np.int32), sample, 1.0, 1.0, "replayed", False, 0, 0)
    logprob = torch.tensor([-3.0 + math.log(x)], requires_grad=True)
    result = policy_loss(logprob, token_batch([weighted], torch.device("cpu")), settings_of("exgrpo").objective)
    result.loss.backward()
    assert -float(result.loss.detach()) == pytest.approx(value, abs=1e-4)
    assert logprob.grad is not None
    assert -float(logprob.grad) / x == pytest.approx(slope, rel=1e-3, abs=1e-4)


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
