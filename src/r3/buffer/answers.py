"""What the buffer answers beside samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Attempts(NamedTuple):
    """Verified attempts at a query, over everything ever sampled."""

    tried: int
    solved: int


class Rewound(NamedTuple):
    """What `forget_after` did: samples removed, and evicted ones brought back."""

    removed: int
    restored: int


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
