"""The sample buffer S: every past response by query, on disk, exact on resume."""

from __future__ import annotations

from pydantic import Field

from r3.buffer.counts import Attempts, Contents, LedgerEntry, Overview, Rewound, Stats
from r3.buffer.damage import Salvaged, salvage
from r3.buffer.database import SampleBufferError
from r3.buffer.store import SampleBuffer
from r3.settings import Settings

__all__ = [
    "Attempts",
    "BufferSettings",
    "Contents",
    "LedgerEntry",
    "Overview",
    "Rewound",
    "Salvaged",
    "SampleBuffer",
    "SampleBufferError",
    "Stats",
    "salvage",
]


class BufferSettings(Settings):
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""
    successes_from: str | None = None
    """Directory of an earlier run of r3 train on the same problems with the same tokenizer: its right answers are
    replayed where this run has too few of its own. It is only read; {seed} in it is this run's seed."""
