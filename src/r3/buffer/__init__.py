"""The sample buffer S: every past response by query, on disk, exact on resume."""

from r3.buffer.counts import Attempts, Contents, LedgerEntry, Overview, Rewound, Stats
from r3.buffer.damage import Salvaged, salvage
from r3.buffer.database import SampleBufferError
from r3.buffer.store import SampleBuffer

__all__ = [
    "Attempts",
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
