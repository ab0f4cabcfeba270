"""Each method by name: what its papers say of small groups, and a naive loss written from their formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.config import load_config
from r3.method.advantage import group_advantages
from r3.method.mixed import StepResult
from r3.method.objective import policy_loss
from r3.method.presets import (
    METHODS,
)
from r3.method.reward import reward_parts
from r3.method.settings import MethodSettings, RewardSettings
from r3.method.step import step
from r3.policy.update import token_batch
from r3.samples import Group, Sample
from tests.method.makers import make_group

LIMIT = 20
REPLAYING = ("repo", "rlep", "exgrpo")  # `test_replay`
ELSEWHERE = ("polaris", "prompt-replay", "sdpo", "luffy", "sage", "critique")  # `test_advantage`, …, `test_help`
BASELINES = [name for name in METHODS if not name.startswith("r3") and name not in (*REPLAYING, *ELSEWHERE)]


def settings_of(name: str, **more: Any) -> MethodSettings:
    return MethodSettings.model_validate({"name": name, "objective": {"constant_length": LIMIT}, **more})


def answer(right: bool, length: int, method: str, query: str, seed: int = 0) -> Sample:
    """An answer rewarded as `method` would, truncated if it is as long as the limit."""
    rng = np.random.default_rng([seed, length, right])
    cut = length >= LIMIT
    right = right and not cut
    parts = reward_parts(right, length, RewardSettings().of(method), limit=LIMIT)  # type: ignore[arg-type]
    logprobs = -rng.exponential(1.0, length).astype(np.float32)
    return Sample(
        query,
        np.arange(length),
        logprobs,
        rng.exponential(1.0, length).astype(np.float32),
        finish="length" if cut else "stop",
        outcome=right,
        reward=sum(parts.values()),
        reward_parts=parts,
    )


def advantages(name: str, *outcomes: Sequence[int], length: int = 4) -> list[list[float]]:
    """The advantages of groups whose answers have equal lengths."""
    groups = [
        make_group([answer(bool(o), length, name, f"q{i}", j) for j, o in enumerate(group)], query_id=f"q{i}")
        for i, group in enumerate(outcomes)
    ]
    return [list(mixed.advantages) for mixed in step(groups, settings_of(name)).groups]


LONE8, LONE16 = [1] + [0] * 7, [1] + [0] * 15


@pytest.mark.parametrize(
    ("name", "outcomes", "expected"),
    [
        ("justrl", LONE8, [2.6458] + [-0.3780] * 7),
        ("grpo", LONE8, [2.6458] + [-0.3780] * 7),
        ("dapo", LONE16, [3.873] + [-0.2582] * 15),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [1, 1, 0, 0], [1, 1, -1, -1]),
        ("maxrl", LONE8, [7] + [-1] * 7),
        ("maxrl", [1, 1], [0, 0]),
        ("maxrl", [0, 0], [0, 0]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("w-reinforce", [1, 1, 1, 0, 0, 0, 0, 0], [0.1] * 3 + [-1] * 5),
        ("w-reinforce", [0, 0], [-1, -1]),
        ("w-reinforce", [1, 1], [0.1, 0.1]),
        ("lens", [1, 1], [0, 0]),
    ],
)
def test_the_worked_examples_of_advantages(name: str, outcomes: list[int], expected: list[float]) -> None:
    assert advantages(name, outcomes)[0] == pytest.approx(expected, abs=1e-4)


def test_reinforce_plus_plus_divides_by_the_batchs_standard_deviation() -> None:
    mixed, solved = advantages("reinforce++", [1, 0], [1, 1])
    assert mixed == pytest.approx([1.4142, -1.4142], abs=1e-4)
    assert solved == [0, 0]
    capped = step(
        [make_group([answer(True, 4, "grpo", "q"), answer(False, 4, "grpo", "q")])],
        settings_of("reinforce++", advantage={"cap": 0.5}),
    )
    assert capped.groups[0].advantages == (0.5, -0.5)


def test_gspo_clips_a_sequence_and_cispo_bounds_a_weight() -> None:
    ratios = torch.tensor([0.02, -0.01, 0.005, 0.001])
    assert math.exp(float(ratios.mean())) == pytest.approx(1.004008, abs=1e-6)
    assert gradients("gspo", [ratios.tolist()], [1.0]) == pytest.approx([0.0] * 4)  # beyond 1.0004: clipped
    assert gradients("cispo", [[math.log(7.0)], [math.log(0.01)]], [1.0, 1.0]) == pytest.approx([-5.0, -0.01])
    assert gradients("dapo", [[math.log(20.0)], [math.log(9.0)]], [-1.0, -1.0]) == pytest.approx([0.0, 9.0])


def gradients(name: str, log_ratios: Sequence[Sequence[float]], of: Sequence[float]) -> list[float]:
    """dloss/dlogp of each token, undivided, for sequences with these ratios and advantages."""
    from r3.method.mixed import WeightedSample

    sequences = []
    for number, (row, advantage) in enumerate(zip(log_ratios, of, strict=True)):
        sample = Sample("q", np.arange(len(row)), np.full(len(row), -1.0), outcome=False)
        sequences.append(WeightedSample(np.array([1]), sample, advantage, 1.0, "fresh", False, number, 0))
    logprobs = torch.tensor([-1.0 + r for row in log_ratios for r in row], requires_grad=True)
    policy_loss(logprobs, token_batch(sequences, torch.device("cpu")), settings_of(name).objective).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


@pytest.mark.parametrize("length", [1, 16, 17, 18, 19, 20])
@pytest.mark.parametrize("right", [True, False])
def test_dapos_reward_is_its_papers_but_for_the_scale(length: int, right: bool) -> None:
    """Eq. 13 with rewards of ±1, and half of that plus a half: ours."""
    buffer = LIMIT * 4096 / 20480
    published = (1 if right else -1) + min(0.0, (LIMIT - buffer - length) / buffer)
    parts = reward_parts(right, length, RewardSettings().of("dapo"), limit=LIMIT)
    assert sum(parts.values()) == pytest.approx((published + 1) / 2)


def test_what_a_reward_is_follows_the_method_until_it_is_said() -> None:
    for name in METHODS:
        reward = RewardSettings().of(name)
        assert reward.length_bonus is name.startswith("r3")
        assert reward.overlong.enabled is (name == "dapo")
        said = RewardSettings.model_validate({"length_bonus": name == "grpo", "overlong": "on"}).of(name)
        assert (said.length_bonus, said.overlong.enabled) == (name == "grpo", True)
    with pytest.raises(ValueError, match="depends on the method"):
        reward_parts(True, 1, RewardSettings(), limit=LIMIT)


GROUPS = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(1, LIMIT)), min_size=4, max_size=4), min_size=1, max_size=5
)


@pytest.mark.parametrize("name", BASELINES)
@given(batch=GROUPS, seed=st.integers(0, 1000))
def test_gradients_are_those_of_a_naive_loss(name: str, batch: list[list[tuple[bool, int]]], seed: int) -> None:
    groups = [
        make_group([answer(right, length, name, f"q{i}", seed + j) for j, (right, length) in enumerate(group)],
                   query_id=f"q{i}")
        for i, group in enumerate(batch)
    ]  # fmt: skip
    rng = np.random.default_rng(seed)
    now = {id(s): torch.tensor(s.logprobs + rng.normal(0, 0.6, len(s)), requires_grad=True) for s in _all(groups)}
    NAIVE[name](groups, now).backward()
    expected = {
        key: values.grad if values.grad is not None else torch.zeros(len(values)) for key, values in now.items()
    }
    got = _ours(step(groups, settings_of(name)), settings_of(name), now)
    for sample in _all(groups):
        ours = got.get(id(sample), torch.zeros(len(sample)))
        assert torch.allclose(ours.double(), expected[id(sample)].double(), atol=1e-5, rtol=1e-4)


def _all(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _ours(result: StepResult, settings: MethodSettings, now: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if not result.weighted:
        return {}
    logprobs = torch.cat([now[id(w.sample)].detach() for w in result.weighted]).float().requires_grad_()
    batch = token_batch(result.weighted, torch.device("cpu"))
    policy_loss(logprobs, batch, settings.objective).loss.backward()
    assert logprobs.grad is not None
    parts = logprobs.grad.split([len(w.sample) for w in result.weighted])
    return {id(w.sample): part for w, part in zip(result.weighted, parts, strict=True)}


# ------------------------------------------------------------- the losses, as the papers write them

Losses = Callable[[Sequence[Group], dict[int, torch.Tensor]], torch.Tensor]


def _centred(group: Group) -> list[float]:
    rewards = [sample.reward for sample in group.samples]
    return [reward - statistics.fmean(rewards) for reward in rewards]


def _by_std(group: Group) -> list[float]:
    spread = statistics.pstdev([sample.reward for sample in group.samples]) + 1e-6
    return [value / spread for value in _centred(group)]


def _by_mean(group: Group) -> list[float]:
    mean = statistics.fmean([sample.reward for sample in group.samples]) + 1e-6
    return [value / mean for value in _centred(group)]


def _ratios(sample: Sample, now: dict[int, torch.Tensor]) -> torch.Tensor:
    return (now[id(sample)] - torch.tensor(sample.logprobs)).exp()


def _ppo(ratio: torch.Tensor, a: float, low: float, high: float, dual: float | None) -> torch.Tensor:
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return torch.minimum(loss, torch.tensor(-dual * a)) if dual is not None and a < 0 else loss


def _by_token(of: Callable[[Group], list[float]], *clip: float, filtered: bool = False) -> Losses:
    def loss(groups: Sequence[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
        kept = [g for g in groups if not filtered or len({s.outcome for s in g.samples}) == 2]
        total, tokens = torch.zeros((), requires_grad=True).clone(), sum(len(s) for s in _all(kept))
        for group in kept:
            for sample, a in zip(group.samples, of(group), strict=True):
                total = total + _ppo(_ratios(sample, now), a, *clip).sum() / tokens  # type: ignore[call-arg]
        return total

    return loss


def _by_sequence(term: Callable[[Sample, float, dict[int, torch.Tensor]], torch.Tensor], of: Any) -> Losses:
    def loss(groups: Sequence[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), requires_grad=True).clone()
        for group in groups:
            for sample, a in zip(group.samples, of(group), strict=True):
                total = total + term(sample, a, now) / (len(groups) * len(group.samples))
        return total

    return loss


def _cispo(groups: Sequence[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
    total, tokens = torch.zeros((), requires_grad=True).clone(), sum(len(s) for s in _all(groups))
    for group in groups:
        for sample, a in zip(group.samples, _by_std(group), strict=True):
            weight = _ratios(sample, now).detach().clamp(0.0, 5.0)
            total = total - (weight * a * now[id(sample)]).sum() / tokens
    return total


def _reinforce_plus_plus(groups: Sequence[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
    spread = statistics.pstdev([value for group in groups for value in _centred(group)])

    def of(group: Group) -> list[float]:
        return [value / (spread + 1e-6) for value in _centred(group)]

    return _by_token(of, 0.2, 0.2, 3.0)(groups, now)


def _gspo(sample: Sample, a: float, now: dict[int, torch.Tensor]) -> torch.Tensor:
    s = (now[id(sample)] - torch.tensor(sample.logprobs)).mean().exp()
    return -torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)


def _rloo(sample: Sample, a: float, now: dict[int, torch.Tensor]) -> torch.Tensor:
    return -(_ratios(sample, now) * a).sum() / LIMIT


def _over_the_others(group: Group) -> list[float]:
    rewards = [sample.reward for sample in group.samples]
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def _with_entropies(group: Group) -> list[torch.Tensor]:
    """RL-ZVP: an advantage for each token of each sample."""
    outcomes = {sample.outcome for sample in group.samples}
    if len(outcomes) == 2:
        return [torch.full((len(s),), a) for s, a in zip(group.samples, _by_std(group), strict=True)]
    entropies = [torch.tensor(sample.entropies) for sample in group.samples]
    return [0.1 * h if outcomes == {True} else -0.1 * (h.max() - h) for h in entropies]


def _zvp(groups: Sequence[Group], now: dict[int, torch.Tensor]) -> torch.Tensor:
    total, tokens = torch.zeros((), requires_grad=True).clone(), sum(len(s) for s in _all(groups))
    for group in groups:
        for sample, a_T in zip(group.samples, _with_entropies(group), strict=True):
            for r, a in zip(_ratios(sample, now), a_T.tolist(), strict=True):
                total = total + _ppo(r, a, 0.2, 0.28, 10.0) / tokens
    return total


def _lens(group: Group) -> list[float]:
    n, outcomes = len(group.samples), [bool(s.outcome) for s in group.samples]
    sure = [float(torch.tensor(s.logprobs, dtype=torch.float64).mean().exp()) for s in group.samples]
    if all(outcomes):
        return [0.0] * n
    bound = 2 * max(sure)
    if any(outcomes):
        bound = max(bound, 1 / (sum(o / c for o, c in zip(outcomes, sure, strict=True)) / n))
    rewards = [o - (1 - o) / n * c / (bound - c) for o, c in zip(outcomes, sure, strict=True)]
    centred = [r - statistics.fmean(rewards) for r in rewards]
    return [c / (statistics.pstdev(rewards) + 1e-6) if any(outcomes) else 0.25 * c for c in centred]


def _signs(group: Group) -> list[float]:
    return [0.1 if sample.outcome else -1.0 for sample in group.samples]


NAIVE: dict[str, Losses] = {
    "grpo": _by_sequence(lambda s, a, now: _ppo(_ratios(s, now), a, 0.2, 0.2, 3.0).mean(), _by_std),
    "dapo": _by_token(_by_std, 0.2, 0.28, 10.0, filtered=True),
    "dr_grpo": _by_sequence(lambda s, a, now: _ppo(_ratios(s, now), a, 0.2, 0.2, 3.0).sum() / LIMIT, _centred),
    "gspo": _by_sequence(_gspo, _by_std),
    "cispo": _cispo,
    "rloo": _by_sequence(_rloo, _over_the_others),
    "reinforce++": _reinforce_plus_plus,
    "justrl": _by_token(_by_std, 0.2, 0.28, 10.0),
    "maxrl": _by_token(_by_mean, 0.2, 0.2, 3.0),
    "rl-zvp": _zvp,
    "lens": _by_sequence(lambda s, a, now: _ppo(_ratios(s, now), a, 0.2, 0.2, 3.0).mean(), _lens),
    "w-reinforce": _by_token(_signs, 0.2, 0.2, 3.0),
}


def test_a_constant_that_nobody_gave_is_the_length_limit() -> None:
    config = load_config(None, ["method=dr_grpo", "rollout.max_tokens=33"])
    assert config.method.objective.constant_length is None
    assert config.settled().method.objective.constant_length == 33
    with pytest.raises(ValueError, match="needs objective"):
        step([make_group([answer(True, 3, "grpo", "q"), answer(False, 3, "grpo", "q")])], MethodSettings(name="rloo"))


def test_maxrl_refuses_what_it_is_not_defined_for() -> None:
    with pytest.raises(ValueError, match="no reward may be negative"):
        group_advantages([1.0, -1.0], scale="mean")
    with pytest.raises(ValidationError, match=r"ranking=off or ranking\.standardised=false"):
        MethodSettings.model_validate({"name": "maxrl", "ranking": "on"})
    with pytest.raises(ValueError, match=r"set reward\.overlong=off"):
        load_config(None, ["method=maxrl", "reward.overlong=on"])
