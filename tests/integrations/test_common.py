"""What all adapters share: `placed` finds the row of every sequence to train on."""

from __future__ import annotations

from typing import Any

import pytest

from r3.integrations.common.plan import placed
from r3.method.settings import MethodSettings
from r3.method.step import step
from r3.samples import Context, Group, Query, Sample

QUERY = Query("q", "1+1=")


def sample(token: int, outcome: bool, **more: Any) -> Sample:
    return Sample("q", [token, 9], [-0.5, -0.5], outcome=outcome, reward=float(outcome), **more)


def test_a_past_sample_may_join_two_groups_of_a_query_met_twice() -> None:
    groups = [Group(QUERY, tuple(sample(10 * g + i, False) for i in range(3)), [7, 8]) for g in (1, 2)]
    history = {"q": [sample(5, True, id=1)]}
    found = list(placed(step(groups, MethodSettings(name="r3-no-ranking"), history=history)))
    assert [(group, member) for group, member, _ in found] == [(g, m) for g in (0, 1) for m in range(4)]
    assert [w.sample.tokens[0] for _, _, w in found] == [10, 11, 12, 5, 20, 21, 22, 5]


@pytest.mark.parametrize(("train_as", "times"), [("reflection", 1), ("plain", 1), ("both", 2)])
def test_reflection_answers_have_a_row_under_each_prompt(train_as: str, times: int) -> None:
    settings = MethodSettings(name="r3-no-ranking", reflection={"train_as": train_as})  # type: ignore[arg-type]
    shown = Context("reflection", 3)
    fresh = tuple(sample(i, i == 0, context=shown) for i in range(2))
    found = list(placed(step([Group(QUERY, fresh, [7, 8], shown, [7])], settings)))
    assert [(group, member) for group, member, _ in found] == [(0, m) for m in range(2) for _ in range(times)]
    assert [w.other_context for _, _, w in found][:2] == {"reflection": [False] * 2, "plain": [True] * 2}.get(
        train_as, [False, True]
    )


def test_members_without_a_gradient_have_no_row() -> None:
    groups = [
        Group(Query("r", "?"), tuple(Sample("r", [i], [-1.0], outcome=False) for i in range(2)), [7]),
        Group(QUERY, (sample(1, True), sample(2, False)), [7, 8]),
    ]
    found = list(placed(step(groups, MethodSettings(name="grpo"))))
    assert [(group, member) for group, member, _ in found] == [(1, 0), (1, 1)]
