"""The paper's reward: right answers get 1 and a bonus for being short, wrong ones 0; DAPO's punishment of long ones.

    right: R = 1 + max(0, 1 − l / L_max)        wrong: R = 0        l = tokens, L_max = 32,768
    overlong (DAPO, Eq. 13): R −= factor · max(0, l − (limit − L_c)) / L_c        limit = rollout.max_tokens

The parts are kept apart, so that the metrics can tell better from shorter. Right or wrong is the verifier's word; a
truncated answer is wrong without being asked, has the limit's length, and so gets −factor where overlong is on.

Departures from the papers:
- L_c is a share of the limit (published: 4,096 of 20,480), so that it means the same for short answers.
- The factor is half of the published 1, whose rewards are −1 and 1 where ours are 0 and 1: after normalising, the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from r3.method.settings import OverlongSettings, RewardSettings


def reward_parts(
    right: bool, length: int, settings: RewardSettings, *, limit: int, scores: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What the reward of an answer of `length` tokens, of at most `limit`, is the sum of.

    `settings` are those of a method (`RewardSettings.of`), with nothing left to be settled. `scores` stand in for the 1
    of a right answer, where the judge gives them.

    >>> paper = RewardSettings().of("r3")
    >>> reward_parts(True, 8192, paper, limit=8192), reward_parts(False, 8192, paper, limit=8192)
    ({'correct': 1.0, 'length': 0.75}, {'correct': 0.0, 'length': 0.0})
    >>> reward_parts(True, 8192, RewardSettings().of("dapo"), limit=8192)
    {'correct': 1.0, 'length': 0.0, 'overlong': -0.5}
    >>> reward_parts(True, 9, RewardSettings().of("grpo"), limit=9, scores={"matches": 1.0, "polite": 0.1})
    {'matches': 1.0, 'polite': 0.1}
    """
    if settings.length_bonus == "auto" or settings.overlong.enabled == "auto":
        raise ValueError("the reward depends on the method: use RewardSettings.of(method's name)")
    bonus = max(0.0, 1 - length / settings.length_limit) if right and settings.length_bonus else 0.0
    parts = {"correct": float(right), "length": bonus} if scores is None else dict(scores)
    if settings.length_bonus:
        parts["length"] = bonus
    return parts | {"overlong": overlong(length, settings.overlong, limit)} if settings.overlong.enabled else parts


def overlong(length: int, settings: OverlongSettings, limit: int) -> float:
    """DAPO's soft punishment: 0 up to the buffer before the limit, then linearly down to −factor at the limit.

    >>> published = OverlongSettings(buffer=0.2, factor=1.0)
    >>> [overlong(length, published, 20_480) for length in (16_384, 17_408, 18_432, 20_480)]
    [0.0, -0.25, -0.5, -1.0]
    """
    buffer = settings.buffer * limit
    beyond = min(length, limit) - limit + buffer
    return -settings.factor * beyond / buffer if beyond > 0 else 0.0
