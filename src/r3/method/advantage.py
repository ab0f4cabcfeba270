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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


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
