"""Exact counts and the uncertainty that belongs to them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`right` of `total` answers, one to a problem."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right}/{self.total} = {self.share:.1%} [{low:.1%}, {high:.1%}]"


def wilson(right: float, total: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval for a proportion: sound at 0, at 1 and for small counts, where ± 2σ is not.

    >>> [round(x, 4) for x in wilson(0, 10)], [round(x, 4) for x in wilson(50, 100)]
    ([0.0, 0.2775], [0.4038, 0.5962])
    """
    if total == 0:
        return 0.0, 1.0
    share = right / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
