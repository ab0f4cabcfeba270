"""The paper's reward: right answers get 1 and a bonus for being short, wrong ones 0.

    right: R = 1 + max(0, 1 − l / L_max)        wrong: R = 0        l = tokens, L_max = 32,768

The parts are kept apart, so that the metrics can tell better from shorter. Right or wrong is the verifier's word.
"""

from __future__ import annotations

from r3.method.settings import RewardSettings


def reward_parts(right: bool, length: int, settings: RewardSettings) -> dict[str, float]:
    """What the reward of an answer of `length` tokens is the sum of.

    >>> reward_parts(True, 8192, RewardSettings()), reward_parts(False, 8192, RewardSettings())
    ({'correct': 1.0, 'length': 0.75}, {'correct': 0.0, 'length': 0.0})
    """
    bonus = max(0.0, 1 - length / settings.length_limit) if right and settings.length_bonus else 0.0
    return {"correct": float(right), "length": bonus}
