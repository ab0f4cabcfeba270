"""Group advantages: Eq. 1 (GRPO) and Eq. 3 (the mixed group of fresh and replayed samples).

    Eq. 1    A_i = (R_i − mean(G)) / (std(G) + λ)
    Eq. 3    A_i = (R_i − mean(G_mix)) / (α · std(G_mix) + λ)          G_mix = G ∪ G_C

Departures from the paper, and choices it leaves open:
- The standard deviation is the population's (divide by n), for which a lone success among n gets √(n−1).
- Equal rewards, and one that lies at the group's mean, give exactly 0, not a rounding error over λ: such a sample is
  then skipped, not trained on noise.
- α acts only where replayed samples joined (see `step`): it tempers them, it is not a second learning rate.
- `scale="none"` (Dr. GRPO), `scale="mean"` (MaxRL), `baseline="leave_one_out"` (RLOO), `cap` and the standard deviation
  of a whole batch (`over_batch`, REINFORCE++) belong to other methods, and are off by default.

Sums are taken with `math.fsum`, which rounds once: reordering a group reorders its advantages, to the bit.

Below them is what a group whose answers are all right or all wrong teaches by itself (`advantage.homogeneous`,
`baseline: sign`).

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
from typing import Literal

import numpy as np

from r3.samples import FloatArray


def group_advantages(
    rewards: Sequence[float],
    *,
    alpha: float = 1.0,
    eps: float = 1e-6,
    scale: Literal["std", "none", "mean"] = "std",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    cap: float | None = None,
) -> list[float]:
    """Advantage of each sample of one group over the group's baseline (Eq. 3; Eq. 1 for alpha = 1).

    >>> group_advantages([1, 0, 0, 0, 0])[0]  # a lone success among n: √(n−1)
    1.999995...
    >>> group_advantages([0.3, 0.3, 0.3])
    [0.0, 0.0, 0.0]
    >>> group_advantages([1.0, 0.0], scale="none", baseline="leave_one_out")
    [1.0, -1.0]
    >>> group_advantages([1, 0, 0, 0], scale="mean", eps=0)  # MaxRL: a lone success gets n − 1
    [3.0, -1.0, -1.0, -1.0]
    """
    _check(scale, baseline, alpha, eps, cap)
    values = [float(reward) for reward in rewards]
    n = len(values)
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards must be finite, got {values}")
    if scale == "mean" and values and min(values) < 0:
        raise ValueError(
            f"advantage.scale=mean (maxrl) divides by the mean reward, so no reward may be negative, and one is "
            f"{min(values):g}: take penalties out of the reward (reward.overlong=off), or use scale=std"
        )
    if n == 0 or min(values) == max(values):
        return [0.0] * n

    centred = less_their_mean(values)
    spread = 1.0
    if scale == "std":
        spread = alpha * math.sqrt(math.fsum(c * c for c in centred) / n) + eps
    elif scale == "mean":
        spread = alpha * (math.fsum(values) / n) + eps
    if spread == 0.0:  # rewards differ by less than their squares can show, and eps is 0
        return [0.0] * n
    if baseline == "leave_one_out":  # R_i − mean of the others
        centred = [c * n / (n - 1) for c in centred]
    advantages = [c / spread for c in centred]
    return advantages if cap is None else [max(-cap, min(cap, a)) for a in advantages]


def less_their_mean(values: Sequence[float]) -> list[float]:
    """The values less their mean; exactly 0 for one that lies there, where subtracting leaves a rounding error.

    >>> less_their_mean([0.1, 0.05, 0.0])[1], 0.05 - math.fsum([0.1, 0.05, 0.0]) / 3
    (0.0, -6.9...e-18)
    """
    mean = math.fsum(values) / len(values)
    noise = 1e-12 * max(map(abs, values))
    return [0.0 if abs(value - mean) <= noise else value - mean for value in values]


def over_batch(
    groups: Sequence[Sequence[float]], alphas: Sequence[float], *, eps: float = 1e-6, cap: float | None = None
) -> list[list[float]]:
    """Centred rewards of all groups of a batch over the batch's standard deviation, times a group's α (REINFORCE++).

    Groups with equal rewards stay at exactly 0 and count in the standard deviation.

    >>> over_batch([[0.5, -0.5], [0.0, 0.0]], [1.0, 1.0], eps=0)[0]
    [1.414..., -1.414...]
    """
    every = [value for group in groups for value in group]
    spread = math.sqrt(math.fsum(value * value for value in every) / len(every)) if every else 0.0
    if spread == 0.0:
        return [[0.0] * len(group) for group in groups]
    most = math.inf if cap is None else cap
    return [
        [max(-most, min(most, value / (alpha * spread + eps))) for value in group]
        for group, alpha in zip(groups, alphas, strict=True)
    ]


def _check(scale: str, baseline: str, alpha: float, eps: float, cap: float | None) -> None:
    if scale not in ("std", "none", "mean"):
        raise ValueError(f"scale must be 'std', 'none' or 'mean', not {scale!r}")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline must be 'mean' or 'leave_one_out', not {baseline!r}")
    if not (alpha > 0 and eps >= 0 and (cap is None or cap > 0)):
        raise ValueError(f"need alpha > 0, eps ≥ 0 and cap > 0 (or None), got {alpha=}, {eps=}, {cap=}")


# -------------------------------------- groups that are all right or all wrong


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
    """Advantages of an all-wrong group: over the mean alone, at a share of the weight of other groups.

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
