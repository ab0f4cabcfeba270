"""Which groups of a batch the loss counts, and how often, where groups without variance leave it (`resample`).

    fill: draw    DAPO, arXiv 2503.14476: other queries were drawn in their place; each group that stays counts once
    fill: copy    POLARIS, ChenxinAn-fdu/POLARIS, `dyn_sampling_polaris`: random copies of the groups that stay take the
                  place of those that leave; if at most min_share of the batch stays, the step trains on nothing

A copy is a weight: a group that counts twice has twice the gradient and counts twice in the denominators.

Departures from POLARIS: copies are drawn with putting back; a copy goes into the same share of the batch as its group
(with several updates per batch theirs may fall into two); reflection groups that teach stay, and are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from r3.method.mixed import MixedGroup
from r3.method.settings import ResampleSettings


def times_counted(groups: Sequence[MixedGroup], settings: ResampleSettings, rng: np.random.Generator) -> list[int]:
    """How often the loss counts each group."""
    if not settings.enabled:
        return [1] * len(groups)
    times = [int(mixed.kept) for mixed in groups]
    if settings.fill == "draw":
        return times
    plain = [place for place, mixed in enumerate(groups) if mixed.group.context.kind == "plain"]
    stay = [place for place in plain if times[place]]
    # A share that is a fraction of the batch, such as 1/3 of 6, is meant exactly.
    if len(stay) <= math.floor(settings.min_share * len(plain) + 1e-9):
        return [0] * len(groups)
    for place in rng.choice(stay, len(plain) - len(stay)).tolist():
        times[place] += 1
    return times
