"""SERR, the structural entropy ranking reward: what a truncated answer is worth when none is right.

With H_t the entropy of the next-token distribution at position t of a response of L tokens:

    peak_i   = mean of the max(1, ⌊p·L⌋) largest H_t          exploration at the forking tokens
    global_i = mean of all H_t                                 stability over the whole
    i ≻ j    ⟺  peak_i > peak_j  and  global_i < global_j
    S_i      = |{ j : i ≻ j }|
    reward of the k-th of N by S (k = 0 best) = R_max · (1 − k / (N − 1))

Departures from the paper, and choices it leaves open:
- Tied scores share the mean of their ranks' rewards: the order of sampling must not pay.
- N = 1 gets 0: there is nothing to rank it against. All tied get equal rewards: no order is invented.
- R_max stays below a right answer's reward (settings enforce it).
- R_max may be annealed (`annealed`), so that entropy is paid for only while there is little else to learn from.
- The reward may be paused while its order predicts nothing (`RankingGate`, below).
- Which samples are ranked (truncated ones, or all failed ones) is `step`'s business.

The ranking's gate (`RankingGate`): the reward is paid only while its order is seen to tell which late answers finish
right.

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
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.method.settings import RankingSettings
from r3.samples import Group

Array = npt.NDArray[np.float64]


def structural_entropy_rewards(
    entropies: Sequence[npt.ArrayLike], *, peak_fraction: float, max_reward: float
) -> list[float]:
    """SERR of each response, from its per-token entropies.

    The first response explores at its forks (high peak) and is sure elsewhere (low global): it dominates both.

    >>> structural_entropy_rewards([[0, 0, 0, 3], [1, 1, 1, 2], [1, 1, 1, 2]], peak_fraction=0.25, max_reward=0.4)
    [0.4, 0.1, 0.1]
    """
    if not max_reward >= 0:
        raise ValueError(f"max_reward must be at least 0, not {max_reward}")
    n = len(entropies)
    if n < 2:
        return [0.0] * n
    peaks_N, globals_N = structure(entropies, peak_fraction=peak_fraction)
    return [float(r) for r in ranked_rewards(dominance_scores(peaks_N, globals_N), max_reward=max_reward)]


def annealed(max_reward: float, updates: int, over: int | None) -> float:
    """R_max after a number of optimiser updates: falling linearly to 0 `over` that many, or as it is.

    >>> annealed(0.1, 50, 100), annealed(0.1, 300, 100), annealed(0.1, 300, None)
    (0.05, 0.0, 0.1)
    """
    return max_reward if over is None else max_reward * max(0.0, 1 - updates / over)


def structure(entropies: Sequence[npt.ArrayLike], *, peak_fraction: float) -> tuple[Array, Array]:
    """Peak and global entropy of each response. [N], [N]"""
    if not 0 < peak_fraction <= 1:
        raise ValueError(f"peak_fraction must be in (0, 1], not {peak_fraction}")
    peaks_N, globals_N = np.empty(len(entropies)), np.empty(len(entropies))
    for i, given in enumerate(entropies):
        h_L = _checked(given, i)
        k = max(1, int(peak_fraction * h_L.size))
        peaks_N[i] = np.partition(h_L, h_L.size - k)[-k:].sum(dtype=np.float64) / k
        globals_N[i] = h_L.sum(dtype=np.float64) / h_L.size
    return peaks_N, globals_N


def dominance_scores(peaks_N: Array, globals_N: Array) -> npt.NDArray[np.int64]:
    """S_i: how many responses i dominates, with a higher peak and a lower global entropy. [N]"""
    higher_NN = peaks_N[:, None] > peaks_N[None, :]
    steadier_NN = globals_N[:, None] < globals_N[None, :]
    scores_N: npt.NDArray[np.int64] = np.sum(higher_NN & steadier_NN, axis=1, dtype=np.int64)
    return scores_N


def ranked_rewards(scores_N: npt.NDArray[np.int64], *, max_reward: float) -> Array:
    """R_max · (1 − k/(N−1)) by rank of the score, best first; ties take the mean of their ranks. [N]"""
    n = len(scores_N)
    if n < 2:
        return np.zeros(n)
    order_NN = scores_N[None, :] - scores_N[:, None]
    mean_rank_N = np.sum(order_NN > 0, axis=1) + (np.sum(order_NN == 0, axis=1) - 1) / 2
    return np.asarray(max_reward * (1 - mean_rank_N / (n - 1)), dtype=np.float64)


def ordered_pairs(scores: npt.ArrayLike, right: npt.ArrayLike) -> tuple[float, int]:
    """How many pairs of a right and a wrong response have the higher score on the right one (a tie counts half), and
    how many pairs there are: their ratio is the AUC of the score.

    >>> ordered_pairs([3, 1, 2], [True, False, False]), ordered_pairs([1, 1, 2], [True, False, False])
    ((2.0, 2), (0.5, 2))
    """
    scores_N, right_N = np.asarray(scores, np.float64), np.asarray(right, bool)
    gaps = scores_N[right_N][:, None] - scores_N[~right_N][None, :]
    return float((gaps > 0).sum() + (gaps == 0).sum() / 2), gaps.size


def late_pairs(
    entropies: Sequence[npt.NDArray[np.floating[Any]]], right: Sequence[bool], *, limit: int, peak_fraction: float
) -> tuple[float, int]:
    """`ordered_pairs` of SERR's order, had responses been cut at half their `limit`: does it tell who finishes right?

    Responses that went on past that point are ordered by what was seen until then, and judged by how they ended. It
    costs no tokens, as the continuation is there already.
    """
    cut = limit // 2
    late = [i for i, h_L in enumerate(entropies) if len(h_L) > cut > 0]
    if len(late) < 2:
        return 0.0, 0
    peaks_N, globals_N = structure([entropies[i][:cut] for i in late], peak_fraction=peak_fraction)
    return ordered_pairs(dominance_scores(peaks_N, globals_N), [right[i] for i in late])


def _checked(given: Any, index: int) -> npt.NDArray[np.floating[Any]]:
    h_L = np.asarray(given)
    if h_L.dtype != np.float32:  # what engines give stays as it is; sums are taken in float64 either way
        h_L = h_L.astype(np.float64)
    if h_L.ndim != 1 or h_L.size == 0:
        raise ValueError(f"entropies[{index}] must be a non-empty list of numbers, got shape {h_L.shape}")
    if not np.isfinite(h_L).all():
        raise ValueError(f"entropies[{index}] holds NaN or infinity")
    return h_L


# -------------------------------------------------------------------- the gate


log = logging.getLogger(__name__)

Pairs = tuple[float, int]
"""How many of a group's pairs of a right and a wrong answer are in order, and how many there are."""


class RankingGate:
    """Says when ranking rewards are paid. `noted` reads at least this many of the newest pairs from the buffer."""

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
    by_group = []
    for group in groups:
        late = late_members(group, limit) if group.context.kind == "plain" else []
        known = [(h, bool(group.samples[i].outcome)) for i in late if (h := group.samples[i].entropies) is not None]
        pairs = late_pairs([h for h, _ in known], [o for _, o in known], limit=limit, peak_fraction=peak_fraction)
        by_group += [pairs] if pairs[1] else []
    return by_group


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
