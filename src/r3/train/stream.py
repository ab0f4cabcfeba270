"""The order of queries: one seeded shuffle per epoch, as a pure function of the position.

The position is all there is to save: a resumed run reads the very queries it would have read, and reading ahead
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from r3.samples import Query


class QueryStream:
    """Queries in training order, epoch after epoch."""

    def __init__(self, queries: Sequence[Query], *, seed: int, epochs: int | None) -> None:
        """`epochs` is None for a stream without an end."""
        self.queries = queries
        self.seed = seed
        self.epochs = epochs
        self.position = 0

    @property
    def end(self) -> int | None:
        """The position behind the last query, if there is one."""
        return None if self.epochs is None else len(self.queries) * self.epochs

    @property
    def exhausted(self) -> bool:
        return self.end is not None and self.position >= self.end

    def epoch_at(self, position: int) -> int:
        """The epoch (from 1) of a position."""
        return position // len(self.queries) + 1

    def take(self, count: int, left_out: Mapping[str, int] | None = None) -> list[tuple[Query, int]]:
        """The next `count` queries (fewer at the end of the last epoch), each with its epoch.

        Queries in `left_out` are skipped in epochs after the one given with their id; not all queries may be.
        """
        taken: list[tuple[Query, int]] = []
        while len(taken) < count and not self.exhausted:
            query, epoch = self._at(self.position)
            self.position += 1
            if left_out is None or left_out.get(query.id, epoch) >= epoch:
                taken.append((query, epoch))
        return taken

    def _at(self, position: int) -> tuple[Query, int]:
        epoch = self.epoch_at(position)
        order = _order(self.seed, epoch, len(self.queries))
        return self.queries[int(order[position % len(self.queries)])], epoch


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(n)
