"""The order of queries: one seeded shuffle per epoch, as a pure function of the position.

The position is all there is to save: a resumed run reads the very queries it would have read, and reading ahead
changes nothing.

`Revisits` adds the queries that are asked again before their turn (`revisit`). How each query fared is saved in
checkpoints, and the choice is seeded by (seed, step): a resumed run asks the
same queries as it would have asked uninterrupted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from r3.method.revisit import RevisitSettings, Seen, choose, ready_again
from r3.samples import Group, Query


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


class Revisits:
    """Takes queries for a step and remembers how they were solved."""

    def __init__(self, stream: QueryStream, settings: RevisitSettings, *, seed: int) -> None:
        self.stream, self.settings, self.seed = stream, settings, seed
        self.seen: dict[str, Seen] = {}
        self.started = settings.start_at is None
        self.retired: dict[str, int] = {}
        """Queries that all answers solved, with the epoch of it."""
        self._queries = {query.id: query for query in stream.queries}

    def take(self, count: int, *, step: int) -> tuple[list[tuple[Query, int]], frozenset[int]]:
        """The queries of a step with their epoch, and which of them, by position, are asked before their turn."""
        if not self.settings.enabled:
            return self.stream.take(count), frozenset()
        most = int(self.settings.share * count) if self.started else 0
        fresh = self._in_turn(count - most)
        again = choose(
            self.seen,
            most,
            self.settings,
            step=step,
            rng=np.random.default_rng([self.seed, step]),
            leave_out={query.id for query, _ in fresh},
        )
        fresh += self._in_turn(count - len(fresh) - len(again))
        epoch = self.stream.epoch_at(max(0, self.stream.position - 1))
        batch = [*fresh, *((self._queries[name], epoch) for name in again)]
        return batch, frozenset(range(len(fresh), len(batch)))

    def _in_turn(self, count: int) -> list[tuple[Query, int]]:
        enough = len(self.stream.queries) - len(self.retired) >= count
        return self.stream.take(count, left_out=self.retired if enough else {})

    def learn(self, groups: Sequence[Group], *, step: int) -> dict[str, float]:
        """Remember how the queries of a step were solved. Returns counts for the metrics."""
        plain = [group for group in groups if group.context.kind == "plain"]
        if self.settings.enabled:
            outcomes = [outcome for group in plain for outcome in group.outcomes]
            start = self.settings.start_at
            self.started = self.started or (start is not None and sum(outcomes) / max(1, len(outcomes)) > start)
            for group in plain if self.started else []:
                self._remember(group, step)
        return {
            "revisit/asked": sum(group.revisited for group in plain),
            "revisit/pool": sum(0 < query.right < query.of for query in self.seen.values()),
            "revisit/retired": len(self.retired),
        }

    def _remember(self, group: Group, step: int) -> None:
        name = group.query.id
        before = self.seen.get(name)
        reused = (before.reused if before is not None else 0) + group.revisited
        rng = np.random.default_rng([self.seed, step, zlib.crc32(name.encode())])
        self.seen[name] = Seen(sum(group.outcomes), len(group), ready_again(step, self.settings, rng), reused)
        if self.settings.retire and group.solve_all:
            self.retired[name] = group.samples[0].epoch

    def state(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {
            "started": self.started,
            "retired": dict(self.retired),
            "seen": {name: [query.right, query.of, query.ready, query.reused] for name, query in self.seen.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.started, self.retired = state["started"], dict(state["retired"])
        self.seen = {name: Seen(*query) for name, query in state["seen"].items()}
