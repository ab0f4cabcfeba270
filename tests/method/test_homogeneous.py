"""Groups that teach by themselves: worked examples, what comes before them, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.config import load_config
from r3.method.advantage import lens_rewards
from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.samples import Group, Sample
from tests.method.makers import REFLECTION, make_group, make_sample


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
