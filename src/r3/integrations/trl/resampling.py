"""Further queries for resampling: the training data in a second order.

TRL fixes before a run how many steps its sampler gives; its epochs, `max_steps` and learning rate depend on that. So
further queries are not taken from the sampler's order, which would end too soon, but from a second one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE = "r3_resampling.json"


class FurtherRows:
    """The rows of the data, pass after pass, each pass shuffled: a pure function of the seed and of the position."""

    def __init__(self, rows: Sequence[Any], *, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.position = 0
        """How many rows were taken: all that a checkpoint must store."""

    def take(self, count: int) -> list[Any]:
        """The next `count` rows."""
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def save(self, folder: str) -> None:
        """Write the position into a checkpoint, whole or not at all."""
        partial = Path(folder) / f"{FILE}.partial"
        partial.write_text(json.dumps({"position": self.position}))
        partial.replace(Path(folder) / FILE)

    def _at(self, position: int) -> Any:
        number, index = divmod(position, len(self.rows))
        if not self.shuffle:
            return self.rows[index]
        return self.rows[int(np.random.default_rng([self.seed, number]).permutation(len(self.rows))[index])]


def saved_position(checkpoint: str) -> int:
    """How many rows had been taken at a checkpoint; 0 if its run did not resample."""
    path = Path(checkpoint) / FILE
    return int(json.loads(path.read_text())["position"]) if path.exists() else 0


def by_rank(rounds: Sequence[int], ranks: int) -> list[int]:
    """The rows of all rounds in the order in which the ranks hold them, by their number in the order of the rounds.

    Each round's rows are dealt over the ranks, and a rank lays those of later rounds behind those of earlier ones.

    >>> by_rank([4, 2], 2)
    [0, 1, 4, 2, 3, 5]
    """
    first = np.cumsum([0, *rounds]).tolist()
    return [
        start + rank * (rows // ranks) + i
        for rank in range(ranks)
        for start, rows in zip(first, rounds, strict=False)
        for i in range(rows // ranks)
    ]
