"""The ranking's gate: its reward is paid only while its order is seen to tell which late answers finish right.

Answers of a group that solved some are cut in hindsight, at half the length limit; SERR orders those that went on past
it by what was seen until then, and how they ended says whether the order was right (`late_pairs`). It costs no tokens.

    pays  ⟺  enough pairs, and  AUC − 2 · its standard error > min_auc          over the newest pairs

The paper always pays; `ranking.gate` is off by default. Choices:
- Pairs of one group share their answers, so the standard error is over groups: that of a ratio of sums.
- Before there are enough pairs nothing is paid: a reward for nothing is worse than none. On data so hard that no group
  solves some, ranking stays paused.
- A step is judged by the pairs of earlier ones, which its buffer holds: a resume pays what the run would have paid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

from r3.method.ranking import late_pairs
from r3.method.settings import RankingSettings
from r3.samples import Group

log = logging.getLogger(__name__)

Pairs = tuple[float, int]
"""Of a group: how many pairs of a right and a wrong answer are in order, and how many there are."""


class RankingGate:
    """Says when ranking rewards are paid. `noted` reads from the buffer the newest pairs, so many or more."""

    def __init__(self, settings: RankingSettings, noted: Callable[[int], Sequence[Pairs]]) -> None:
        self.settings = settings
        self.on = settings.enabled and settings.gate
        self._noted = noted
        self._was_paused = False

    def paused(self) -> bool:
        """Whether rewards are not paid for the time being; says so when that changes."""
        if not self.on:
            return False
        groups = self._noted(self.settings.auc_window)
        paused = not predicts(groups, self.settings)
        if paused != self._was_paused:
            log.info(
                "ranking %s: the AUC of its order is %.2f ± %.2f over the last %d pairs of a right and a wrong late "
                "answer (at least %d are asked for)",
                *("pauses" if paused else "is paid", *auc(groups), sum(of for _, of in groups)),
                self.settings.auc_window,
            )
            self._was_paused = paused
        return paused

    def counts(self) -> dict[str, float]:
        """What the metrics say of it."""
        if not self.on:
            return {}
        groups = self._noted(self.settings.auc_window)
        share, error = auc(groups)
        return {
            "ranking/paused": float(not predicts(groups, self.settings)),
            "ranking/gate_pairs": sum(of for _, of in groups),
            "ranking/gate_low": max(0.0, share - 2 * error) if groups else 0.0,
        }

    def members(self, group: Group) -> list[int]:
        """The samples whose entropies it looks at."""
        return late_members(group, self._limit) if self.on and group.context.kind == "plain" else []

    def pairs(self, groups: Iterable[Group]) -> list[Pairs]:
        """What is to be noted of a step's groups."""
        if not self.on:
            return []
        return pairs_of_groups(groups, limit=self._limit, peak_fraction=self.settings.peak_fraction)

    @property
    def _limit(self) -> int:
        if self.settings.limit is None:
            raise ValueError("ranking.gate needs ranking.limit, the limit of generated tokens")
        return self.settings.limit


def pairs_of_groups(groups: Iterable[Group], *, limit: int, peak_fraction: float) -> list[Pairs]:
    """`late_pairs` of each plain group that has any: a right and a wrong answer past half the limit, and entropies."""
    found = []
    for group in groups:
        late = late_members(group, limit) if group.context.kind == "plain" else []
        known = [(h, bool(group.samples[i].outcome)) for i in late if (h := group.samples[i].entropies) is not None]
        pairs = late_pairs([h for h, _ in known], [o for _, o in known], limit=limit, peak_fraction=peak_fraction)
        found += [pairs] if pairs[1] else []
    return found


def late_members(group: Group, limit: int) -> list[int]:
    """Which answers went on past half the limit, where some of the group are right and some wrong."""
    if group.solve_none or group.solve_all:
        return []
    return [i for i, sample in enumerate(group.samples) if len(sample) > limit // 2]


def auc(groups: Sequence[Pairs]) -> tuple[float, float]:
    """The AUC over groups' (pairs in order, pairs), and its standard error; groups, not pairs, are independent.

    >>> auc([(1.0, 1), (1.0, 1), (0.0, 1), (1.0, 1)])
    (0.75, 0.25)
    """
    pairs = sum(of for _, of in groups)
    if not pairs:
        return math.nan, math.inf
    share = math.fsum(in_order for in_order, _ in groups) / pairs
    if len(groups) < 2:
        return share, math.inf
    squares = math.fsum((in_order - share * of) ** 2 for in_order, of in groups)
    return share, math.sqrt(squares * len(groups) / (len(groups) - 1)) / pairs


def predicts(groups: Sequence[Pairs], settings: RankingSettings) -> bool:
    """Whether the order is seen to tell who finishes right: enough pairs, and an AUC that is above chance for sure.

    >>> settings = RankingSettings(auc_window=8)
    >>> predicts([(2.0, 2)] * 3, settings), predicts([(2.0, 2)] * 4, settings), predicts([(1.0, 2)] * 4, settings)
    (False, True, False)
    """
    share, error = auc(groups)
    return sum(of for _, of in groups) >= settings.auc_window and share - 2 * error > settings.min_auc
