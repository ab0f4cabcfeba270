"""From what the algorithm decided to the rows that every rank trains on: pure functions, run by the main process.

`plan_rows` translates it to TRL's rows; `lay_out` gives every rank the same number of rows, which TRL can split into
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings
from r3.samples import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class ExtraRow:
    """A sequence to train on that TRL did not generate in this batch under this prompt."""

    prompt: IntArray
    tokens: IntArray
    behaviour: FloatArray | None
    """Log-probs when it was drawn; None if that was under another prompt, so that they do not apply."""
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train on, the same on every rank."""

    advantages: npt.NDArray[np.float64]
    """The advantage of each generated row, over all ranks; 0 for rows that are not trained on."""
    weights: npt.NDArray[np.float64]
    """What one token of each weighs in the loss, all denominators included."""
    lengths: tuple[int, ...]
    """Tokens of each generated answer."""
    extra: tuple[ExtraRow, ...]
    tokens: int
    """Tokens of all members of all groups: the denominator of losses that count tokens."""
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows of one rank: which it keeps, which extra ones it takes, how many empty ones fill it up."""

    kept: tuple[int, ...]
    extra: tuple[int, ...]
    empty: int

    def __len__(self) -> int:
        return len(self.kept) + len(self.extra) + self.empty


def plan_rows(result: StepResult, settings: MethodSettings) -> Plan:
    """What was decided about the batch, row by row. TRL generated the rows of a group side by side, group by group."""
    first = np.cumsum([0, *(len(mixed.group) for mixed in result.groups)])
    advantages, weights = np.zeros(first[-1]), np.zeros(first[-1])
    extra = []
    for w in result.weighted:
        if w.origin == "replayed" or w.other_context:
            behaviour = None if w.other_context else w.sample.logprobs
            extra.append(ExtraRow(w.prompt, w.sample.tokens, behaviour, w.advantage, w.weight))
        else:
            row = first[w.group] + w.member
            advantages[row], weights[row] = w.advantage, w.weight
    members = [member.sample for mixed in result.groups for member in mixed.members]
    tokens = sum(len(sample) for sample in members if not (settings.mask_truncated and sample.truncated))
    return Plan(advantages, weights, tuple(map(len, result.samples)), tuple(extra), tokens, result.counts)


def lay_out(trained: Sequence[bool], ranks: int, extra: int, *, at_least: int, multiple: int) -> list[RankRows]:
    """Equal rows for all ranks. Rows with a gradient stay where they are; the others give way to extra rows.

    `trained` has for each generated row, rank after rank, whether it has a gradient. Every rank gets `at_least` rows,
    or more if the ones with a gradient do not fit, always a multiple of `multiple`.

    >>> lay_out([True, True, False, False], 2, 1, at_least=2, multiple=1)
    [RankRows(kept=(0, 1), extra=(), empty=0), RankRows(kept=(0,), extra=(0,), empty=0)]
    """
    share = len(trained) // ranks
    rows = [[i for i in range(share) if trained[rank * share + i]] for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for index in range(extra):
        emptiest = min(range(ranks), key=lambda rank: len(rows[rank]) + len(taken[rank]))
        taken[emptiest].append(index)
    needed = max(len(kept) + len(more) for kept, more in zip(rows, taken, strict=True))
    size = multiple * max(math.ceil(at_least / multiple), math.ceil(needed / multiple))
    laid = []
    for rank, (kept, more) in enumerate(zip(rows, taken, strict=True)):
        spare = [i for i in range(share) if not trained[rank * share + i]]
        spare = spare[: size - len(kept) - len(more)]
        empty = size - len(kept) - len(more) - len(spare)
        laid.append(RankRows(tuple(sorted([*kept, *spare])), tuple(more), empty))
    return laid
