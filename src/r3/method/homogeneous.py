"""What a group whose answers are all right or all wrong teaches by itself (`advantage.homogeneous`, `baseline: sign`).

    zvp     RL-ZVP, arXiv 2509.21880, Eq. 5: every token has an advantage of its own, by its entropy H_t
                all right   A_t = +α · H_t
                all wrong   A_t = −α · (max_k H_k − H_t)           the maximum is over the same answer
    lens    LENS, arXiv 2510.08696: a wrong answer costs more the surer the policy was of it
                π̄ = exp(mean_t log π_behave(t))
                R̃ = R − (1 − o) · π̄ / (G · (D − π̄))               o: 1 for a right answer, 0 for a wrong one
                all wrong   D = 2 · max π̄;  A = weight · (R̃ − mean R̃)
                mixed       D = max(1 / mean(o / π̄), 2 · max π̄);  R̃ is compared like any reward
    signed  W-REINFORCE, arXiv 2506.01347: no baseline; A = λ for a right answer, −1 for a wrong one

Departures from the sources, and choices they leave open:
- A group is homogeneous if its answers' outcomes are equal, whatever their rewards, and if neither replay nor ranking
  made them comparable: those come first. LENS leaves groups that are all right as they are.
- RL-ZVP's entropies are those at sampling time; with one update per batch they are the current ones.
- LENS writes the importance term of D with π; here it is π̄, since the probability of a whole answer is so small that
  the term would never decide. Which of the two was run, the paper does not say.
- Reflection groups are left alone: what the policy does wrong with an attempt before its eyes is pushed away there
  only as far as other answers to that prompt were better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from r3.method.advantage import group_advantages
from r3.samples import FloatArray


def zvp(entropies: FloatArray, right: bool, alpha: float) -> FloatArray:
    """RL-ZVP's advantage of each token of an answer.

    >>> [round(x, 4) for x in zvp(np.array([0.2, 1.0, 0.6]), True, 0.1).tolist()]
    [0.02, 0.1, 0.06]
    >>> [round(x, 4) for x in zvp(np.array([0.2, 1.0, 0.6]), False, 0.1).tolist()]
    [-0.08, 0.0, -0.04]
    """
    values = np.asarray(entropies, dtype=np.float64)
    weighed = alpha * values if right else alpha * (values - values.max())
    return weighed.astype(np.float32)


def confidence(logprobs: FloatArray) -> float:
    """π̄: the geometric mean of an answer's token probabilities."""
    return math.exp(math.fsum(logprobs.tolist()) / len(logprobs))


def lens_rewards(rewards: Sequence[float], outcomes: Sequence[bool], confidences: Sequence[float]) -> list[float]:
    """R̃: the rewards, less what wrong answers cost for the confidence that they were given with.

    >>> [round(r, 5) for r in lens_rewards([0] * 4, [False] * 4, [0.9, 0.8, 0.6, 0.5])]
    [-0.25, -0.2, -0.125, -0.09615]
    """
    n = len(rewards)
    inverse = [1 / max(c, 1e-300) for c, right in zip(confidences, outcomes, strict=True) if right]
    bound = max(2 * max(confidences), n / math.fsum(inverse) if inverse else 0.0)
    if bound == 0.0:  # nothing has a probability that a float can hold
        return list(rewards)
    return [
        reward if right else reward - sure / (n * (bound - sure))
        for reward, right, sure in zip(rewards, outcomes, confidences, strict=True)
    ]


def lens_advantages(costs: Sequence[float], weight: float) -> list[float]:
    """Of an all-wrong group: over the mean alone, at a share of the weight of other groups.

    >>> [round(a, 5) for a in lens_advantages([-0.25, -0.2, -0.125, -0.09615], 0.25)]
    [-0.02055, -0.00805, 0.0107, 0.01791]
    """
    return [weight * advantage for advantage in group_advantages(costs, scale="none")]


def signed(outcomes: Sequence[bool], right_weight: float) -> list[float]:
    """W-REINFORCE's advantages.

    >>> signed([True, False, False], 0.1)
    [0.1, -1.0, -1.0]
    """
    return [right_weight if right else -1.0 for right in outcomes]
