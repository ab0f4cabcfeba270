"""How the groups are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from r3.settings import Settings


class RolloutSettings(Settings):
    """Sampling the groups."""

    engine: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """Which engine draws the samples; auto takes native on a CUDA card where it knows the model, else transformers."""
    group_size: int = Field(8, ge=2, le=100_000)
    """G: samples per prompt. A group of one has nothing to compare with."""
    max_tokens: int = Field(1024, ge=1, le=10_000_000)
    """Longest response; longer ones are cut (truncated)."""
    temperature: float = Field(1.0, ge=1e-3, le=1e3)
    """Sampling temperature; the update uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the drawn distribution is not the policy's own: ratios are then off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 for all. The same warning applies."""
    max_rows: int = Field(256, ge=1, le=1_000_000)
    """Most responses generated side by side."""
    memory: float = Field(0.85, gt=0, lt=1)
    """Share of the card's free memory that the engine's key-value cache may take while it runs."""
