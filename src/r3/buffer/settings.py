"""How much the sample buffer keeps."""

from __future__ import annotations

from pydantic import Field

from r3.settings import Settings


class BufferSettings(Settings):
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""
    successes_from: str | None = None
    """Directory of an earlier run of r3 train on the same problems with the same tokenizer: its right answers are
    replayed where this run has too few of its own. It is only read; {seed} in it is this run's seed."""
