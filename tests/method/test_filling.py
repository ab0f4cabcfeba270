"""POLARIS: copies of groups with variance in the place of those without; covers r3.method.mixed."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import r3.method.step
from r3.method.mixed import MixedGroup, times_counted
from r3.method.objective import policy_loss
from r3.method.settings import MethodSettings, ResampleSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import Group, Sample
from tests.method.makers import REFLECTION, make_group, make_sample

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
