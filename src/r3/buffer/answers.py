"""What the buffer answers beside samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from r3.samples import ContextKind


class Attempts(NamedTuple):
    """Verified attempts at a query, over everything ever sampled."""

    tried: int
    solved: int


class Rewound(NamedTuple):
    """What `forget_after` did: samples removed, and evicted ones brought back."""

    removed: int
    restored: int


class LedgerEntry(NamedTuple):
    """The attempts at one query under one kind of prompt in one step."""

    step: int
    context: ContextKind
    tried: int
    solved: int


class QueryRate(NamedTuple):
    """How a query has fared under its plain prompt."""

    query_id: str
    tried: int
    solved: int
    last_step: int


class AtStep(NamedTuple):
    """Living samples at the end of a step, and how many were ever evicted until then."""

    step: int
    right: int
    wrong: int
    unverified: int
    evicted: int


class OfStep(NamedTuple):
    """Living samples that were drawn in a step: how old the buffer's content is."""

    step: int
    right: int
    wrong: int


class Overview(NamedTuple):
    over_time: list[AtStep]
    by_age: list[OfStep]
    hardest: list[QueryRate]
    never_solved: int
    """Queries tried under their plain prompt and never solved there."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Living samples unless said otherwise."""

    samples: int
    right: int
    wrong: int
    unverified: int
    truncated: int
    tokens: int
    evicted: int
    """Evicted rows kept for a rewind: `settle` removes them."""
    queries: int
    """Queries ever seen."""
    oldest_step: int | None
    newest_step: int | None
    newest_policy_version: int | None
    bytes_on_disk: int
    """The file and its log; 0 in memory."""
