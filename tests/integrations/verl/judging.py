"""A judge as a user of verl writes one (`reward.custom_reward_function`)."""

from __future__ import annotations

from typing import Any

from tests.train.tiny import judge


def judged(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> float:
    assert data_source == "contract"
    return float(judge(solution_str, ground_truth))
