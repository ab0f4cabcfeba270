"""Several processes, one loop: rank 0 runs it, the others do their share of generating and of gradients.

The loop sees an engine and an updater as always. Behind them rank 0 says what is to be done and every rank does its
part: requests are dealt out in turn, each rank answering with its own copy of the weights; of an update each takes
whole micro-batches, as even in tokens as they come. A sample's weight already holds the denominators of the whole
batch, so gradients add up to those of one process, however ragged the shares, and there is one exchange an update: no
rank waits for another's micro-batches. Tasks, verdicts, the buffer and the run directory are rank 0's alone.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.config import Config
from r3.errors import RunError
from r3.method.mixed import WeightedSample
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.update import Updater, UpdateReport
from r3.policy.world import ShardedOptimiser, ShardedPolicy, World
from r3.rollout import Engine, Request, Response, Sampling
from r3.train.build import make_engine
from r3.train.resume import load_state

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank needs to know before the first step."""

    total_updates: int
    checkpoint: Path | None


@dataclass(frozen=True, slots=True)
class Generate:
    requests: Sequence[Request]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Release:
    pass


@dataclass(frozen=True, slots=True)
class Gather:
    """Put the sharded optimiser's state together: rank 0 writes a checkpoint."""


@dataclass(frozen=True, slots=True)
class Update:
    weighted: Sequence[WeightedSample]
    version: int
    seed: Sequence[int]


class SharedEngine:
    """Rank 0's engine: its own share first, as it finishes, then what the others wrote."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.engine, self.world, self.exact = engine, world, engine.exact

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        self.world.broadcast(Generate(list(requests), sampling))
        shares = None
        try:
            yield from _own_share(self.engine, self.world, requests, sampling)
        finally:  # also if the caller stops half-way: the others will send what they were asked for
            shares = self.world.gather(None)
        for responses in (shares or [])[1:]:
            yield from responses

    def release(self) -> None:
        self.world.broadcast(Release())
        self.engine.release()


class SharedUpdater(Updater):
    """Rank 0's updater: every rank makes the same update."""

    def update(self, weighted: Sequence[WeightedSample], *, version: int, seed: Sequence[int]) -> UpdateReport:
        self.world.broadcast(Update(list(weighted), version, seed))
        return super().update(weighted, version=version, seed=seed)

    def optimiser_state(self) -> dict[str, Any]:
        if self.sharded is not None:  # every rank has a part of it
            self.world.broadcast(Gather())
        return super().optimiser_state()


def make_updater(config: Config, policy: Policy, total_updates: int, *, exact: bool, world: World) -> Updater:
    """This rank's updater: alone, leading or serving; of the whole policy or of its part."""
    sharded = ShardedPolicy(policy, world) if config.train.shard and world.size > 1 else None
    if sharded is not None:
        optimiser: Optimiser = ShardedOptimiser(sharded, policy, config.train, total_updates)
    else:
        optimiser = Optimiser(policy.model.parameters(), config.train, total_updates)
    leads = world.size > 1 and world.rank == 0
    return (SharedUpdater if leads else Updater)(
        policy,
        optimiser,
        config.method.objective,
        config.train,
        config.rollout.temperature,
        exact=exact,
        world=world,
        sharded=sharded,
    )


def _own_share(
    engine: Engine, world: World, requests: Sequence[Request], sampling: Sampling
) -> Generator[Response, None, None]:
    """Every size-th request, numbered as in the whole."""
    for response in engine.generate(requests[world.rank :: world.size], sampling):
        yield replace(response, request=world.rank + response.request * world.size)


def serve(config: Config, world: World, adapters_from: Path | None) -> None:
    """What every rank but the first does, until rank 0 says that it is over. It is rank 0 that a signal stops."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    policy = Policy.load(config.model, adapters_from=adapters_from)
    if config.method.objective.kl > 0:
        policy.keep_reference()
    engine = make_engine(config, policy)
    start = world.broadcast()
    if start is None:
        return
    updater = make_updater(config, policy, start.total_updates, exact=engine.exact, world=world)
    if start.checkpoint is not None:
        load_state(policy, updater.optimiser, start.checkpoint)
    while (order := world.broadcast()) is not None:
        if isinstance(order, Generate):
            world.gather(list(_own_share(engine, world, order.requests, order.sampling)))
        elif isinstance(order, Update):
            updater.update(order.weighted, version=order.version, seed=order.seed)
        elif isinstance(order, Gather):
            updater.optimiser_state()
        else:
            engine.release()


def dismiss(world: World) -> None:
    """Tell the others that it is over; if one is gone already, that was said before."""
    try:
        world.broadcast(None)
    except RunError as error:
        log.debug("%s", error)
