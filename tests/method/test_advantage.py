"""Eq. 1, Eq. 3 and their variants against formulas and exact laws; groups that teach by themselves or are filled.

Covers r3.method.mixed, r3.method.advantage.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import r3
import r3.method.step
from r3.config import load_config
from r3.method.advantage import group_advantages, lens_rewards
from r3.method.mixed import MixedGroup, StepResult, times_counted
from r3.method.objective import policy_loss
from r3.method.settings import MethodSettings, ResampleSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import Group, Sample
from tests.method.makers import REFLECTION, make_group, make_sample

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


# Groups that teach by themselves: worked examples, what comes before them, and what they refuse.


def settings_of(name: str, **more: Any) -> MethodSettings:
    return MethodSettings.model_validate({"name": name, **more})


def sure(right: bool, probability: float, length: int = 3) -> Sample:
    """An answer of that geometric mean probability per token."""
    logprobs = np.full(length, math.log(probability), np.float32)
    return Sample("q", np.arange(length), logprobs, np.ones(length), outcome=right, reward=float(right))


@pytest.mark.parametrize(("right", "expected"), [(True, [0.02, 0.1, 0.06]), (False, [-0.08, 0.0, -0.04])])
def test_zvp_rewards_open_tokens_of_right_answers_and_spares_them_in_wrong_ones(
    right: bool, expected: list[float]
) -> None:
    group = make_group([make_sample(right, entropies=[0.2, 1.0, 0.6])] * 2)
    result = step([group], settings_of("rl-zvp"))
    for weighted in result.weighted:
        assert weighted.advantage_T.tolist() == pytest.approx(expected)
        assert weighted.advantage == pytest.approx(np.mean(expected))
    assert len(result.weighted) == 2
    assert result.counts["homogeneous/groups"] == 1


def test_zvp_skips_answers_whose_tokens_are_all_as_open_as_each_other() -> None:
    flat, other = make_sample(False, entropies=[0.5] * 3), make_sample(False, entropies=[0.1, 0.5, 0.5])
    result = step([make_group([flat, other])], settings_of("rl-zvp"))
    assert [weighted.member for weighted in result.weighted] == [1]
    assert result.weighted[0].weight == pytest.approx(1 / 6)  # the other's tokens still count
    assert result.counts["samples/skipped"] == 1


def test_lens_gives_all_wrong_groups_a_spread() -> None:
    group = make_group([sure(False, p) for p in (0.9, 0.8, 0.6, 0.5)])
    mixed = step([group], settings_of("lens")).groups[0]
    assert mixed.rewards == pytest.approx([-0.25, -0.2, -0.125, -0.09615], abs=1e-5)
    assert mixed.advantages == pytest.approx([-0.02055, -0.00805, 0.01070, 0.01791], abs=1e-5)


@given(st.lists(st.tuples(st.booleans(), st.floats(1e-6, 1.0)), min_size=2, max_size=8))
def test_lens_costs_no_right_answer_anything_and_more_the_surer_a_wrong_one_was(
    group: list[tuple[bool, float]],
) -> None:
    outcomes, confidences = [o for o, _ in group], [c for _, c in group]
    costs = lens_rewards([float(o) for o in outcomes], outcomes, confidences)
    assert all(cost == 1.0 for cost, right in zip(costs, outcomes, strict=True) if right)
    wrong = sorted((c, -cost) for c, cost, right in zip(confidences, costs, outcomes, strict=True) if not right)
    assert [cost for _, cost in wrong] == sorted(cost for _, cost in wrong)
    assert all(0 < cost < 1 / len(group) + 1e-9 for _, cost in wrong)


def outcomes_of(result: StepResult) -> list[float]:
    return list(result.groups[0].advantages)


@pytest.mark.parametrize("kind", ["zvp", "lens", "signed"])
def test_history_and_ranking_come_first_and_reflection_is_left_alone(kind: str) -> None:
    wrong = [make_sample(False, tokens=[i, 2, 3], entropies=[4.0 + i, 3.0 - i, 3.0 - i]) for i in range(4)]
    past, more = make_sample(True, tokens=[9, 9, 9]), {"advantage": {"homogeneous": kind}}
    group = make_group(wrong)

    def taught(settings: MethodSettings, group: Group = group, history: Any = None) -> bool:
        return step([group], settings, history=history).groups[0].by_itself

    replaying = settings_of("r3-no-ranking", **more)
    assert taught(replaying)
    assert not taught(replaying, history={"q": [past]})
    ranking = settings_of("r3", ranking={"scope": "failed"}, **more)
    assert not taught(ranking)
    reflected = [make_sample(False, tokens=[i], context=REFLECTION) for i in range(2)]
    assert not taught(replaying, make_group(reflected, context=REFLECTION))


def test_signed_and_its_weight() -> None:
    group = make_group([make_sample(True)] * 2)
    options = {"homogeneous": "signed", "right_weight": 0.3}
    assert outcomes_of(step([group], settings_of("grpo", advantage=options))) == [0.3, 0.3]
    assert outcomes_of(step([group], settings_of("grpo", advantage={**options, "cap": 0.2}))) == [0.2, 0.2]
    mixed = make_group([make_sample(True), make_sample(False)])
    assert outcomes_of(step([mixed], settings_of("w-reinforce", advantage={"cap": 0.5}))) == [0.1, -0.5]
    assert outcomes_of(step([mixed], settings_of("grpo", advantage=options))) == pytest.approx([1, -1], abs=1e-4)


def test_zvp_without_entropies_says_so() -> None:
    bare = Sample("q", np.arange(2), np.zeros(2), outcome=False)
    with pytest.raises(ValueError, match="homogeneous=zvp needs entropies, and a sample of query 'q' has none"):
        step([make_group([bare, bare])], settings_of("rl-zvp"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "rl-zvp", "resample": "on"}, "set resample=off"),
        ({"name": "w-reinforce", "resample": "on"}, "set resample=off"),
        ({"name": "rl-zvp", "mask_truncated": True}, "set mask_truncated=false"),
        ({"name": "lens", "advantage": {"scale": "mean"}}, "use another scale"),
        ({"name": "w-reinforce", "advantage": {"scale": "std"}}, r"set advantage\.scale=none"),
        ({"name": "w-reinforce", "advantage": {"homogeneous": "zvp"}}, "set one of them"),
        ({"name": "w-reinforce", "ranking": "on"}, "set ranking=off"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MethodSettings.model_validate(settings)


@pytest.mark.parametrize(
    "overrides",
    [("rl-zvp", "rollout.top_p=0.9"), ("lens", "rollout.top_k=5"), ("lens", "rollout.temperature=0.8")],
)
def test_confidence_is_the_policys_own(overrides: tuple[str, str]) -> None:
    method, narrowed = overrides
    load_config(None, [f"method={method}"])
    with pytest.raises(ValueError, match=r"set rollout\.top_p=1"):
        load_config(None, [f"method={method}", narrowed])


# POLARIS: copies of groups with variance in the place of those without.


POLARIS = MethodSettings(name="polaris")


def group(outcomes: list[bool], number: int, seed: int = 0) -> Group:
    rng = np.random.default_rng([seed, number])
    samples = []
    for right in outcomes:
        n = int(rng.integers(1, 9))
        logprobs = -rng.exponential(1.0, n)
        samples.append(Sample(f"q{number}", np.arange(n), logprobs, outcome=right, reward=float(right)))
    return make_group(samples, query_id=f"q{number}")


def batch(kinds: str, seed: int = 0) -> list[Group]:
    """A letter for each group: n(one right), a(ll right), m(ixed)."""
    outcomes = {"n": [False] * 3, "a": [True] * 3, "m": [True, False, False]}
    return [group(outcomes[kind], number, seed) for number, kind in enumerate(kinds)]


def test_a_third_or_less_with_variance_is_skipped_and_more_is_filled_with_copies() -> None:
    """The worked example: of 6 groups 2 are not more than ⌊6/3⌋; with 3 three copies are drawn."""
    skipped = step(batch("mmnnna"), POLARIS)
    assert skipped.weighted == ()
    assert skipped.counts["resample/copies"] == 0
    assert len(skipped.samples) == 18  # stored all the same
    times = []
    for version in range(400):
        filled = step(batch("mnmnam"), POLARIS, policy_version=version)
        assert {w.group for w in filled.weighted} == {0, 2, 5}
        assert filled.counts["resample/copies"] == 3
        tokens = {w.group: w.weight for w in filled.weighted}
        times.append([tokens[g] for g in (0, 2, 5)])
    shares = np.array(times) / np.array(times).min()  # in units of one token of one copy
    assert (shares / shares.sum(1, keepdims=True) * 6).mean(0) == pytest.approx([2, 2, 2], abs=0.2)


@given(
    kinds=st.text("nam", min_size=1, max_size=9), share=st.sampled_from([0.0, 0.25, 1 / 3, 0.5]), seed=st.integers(0)
)
def test_the_batch_stays_as_large_or_is_skipped(kinds: str, share: float, seed: int) -> None:
    settings = ResampleSettings(enabled=True, fill="copy", min_share=share)
    mixed = step([*batch(kinds), reflected()], MethodSettings(name="grpo")).groups
    times = times_counted(mixed, settings, np.random.default_rng(seed))
    informative = kinds.count("m")
    if informative > int(share * len(kinds) + 1e-6):
        assert sum(times[:-1]) == len(kinds)
        assert [count > 0 for count in times] == [kind == "m" for kind in kinds] + [True]
        assert times[-1] == 1  # a reflection group is not copied
    else:
        assert set(times) == {0}


def reflected() -> Group:
    samples = [make_sample(right, query_id="r", context=REFLECTION) for right in (True, False)]
    return make_group(samples, context=REFLECTION, query_id="r")


@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_those_of_a_batch_with_the_copies_in_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    groups = batch("".join(rng.choice(list("nammm"), 7)), seed)
    times: list[int] = []

    def spy(mixed: list[MixedGroup], settings: ResampleSettings, rng: np.random.Generator) -> list[int]:
        times[:] = times_counted(mixed, settings, rng)
        return times

    monkeypatch.setattr(r3.method.step, "times_counted", spy)
    result = step(groups, POLARIS, seed=seed)
    every = [sample for one in groups for sample in one.samples]
    now = {id(s): torch.tensor(s.logprobs + rng.normal(0, 0.4, len(s)), requires_grad=True) for s in every}
    naive([one for one, count in zip(groups, times, strict=True) for _ in range(count)], now).backward()
    got = {}
    if result.weighted:
        logprobs = torch.cat([now[id(w.sample)].detach() for w in result.weighted]).float().requires_grad_()
        policy_loss(logprobs, token_batch(result.weighted, torch.device("cpu")), POLARIS.objective).loss.backward()
        assert logprobs.grad is not None
        parts = logprobs.grad.split([len(w.sample) for w in result.weighted])
        got = {id(w.sample): part for w, part in zip(result.weighted, parts, strict=True)}
    for sample in every:
        grad = now[id(sample)].grad
        expected = torch.zeros(len(sample)) if grad is None else grad.float()
        assert torch.allclose(got.get(id(sample), torch.zeros(len(sample))), expected, atol=1e-5, rtol=1e-4)


def naive(groups: list[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
    """Token mean of PPO's loss with clip 0.2/0.28 and dual clip 3, over the groups as they are."""
    total, tokens = torch.zeros((), requires_grad=True).clone(), sum(len(s) for g in groups for s in g.samples)
    for one in groups:
        rewards = [sample.reward for sample in one.samples]
        for sample, reward in zip(one.samples, rewards, strict=True):
            a = (reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-6)
            ratio = (now[id(sample)] - torch.tensor(sample.logprobs)).exp()
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            total = total + (loss.clamp(max=-3.0 * a) if a < 0 else loss).sum() / tokens
    return total


def test_a_share_of_what_is_drawn_again_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"set resample\.fill=copy"):
        MethodSettings.model_validate({"name": "dapo", "resample": {"min_share": 0.5}})
    assert MethodSettings.model_validate({"name": "dapo", "resample": {"fill": "copy"}}).resample.enabled
