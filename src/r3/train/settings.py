"""How long a run is and how large its steps are."""

from __future__ import annotations

from pydantic import Field

from r3.policy.settings import OptimiserSettings


class TrainSettings(OptimiserSettings):
    """The loop and the optimiser."""

    queries_per_step: int = Field(16, ge=1, le=1_000_000)
    """D_b: queries per step."""
    epochs: int = Field(3, ge=1, le=1_000_000)
    """Passes over the task, where train.steps does not say how long the run is."""
    steps: int | None = Field(None, ge=1)
    """Number of steps, in as many passes over the task as that takes; epochs is then ignored, like max_steps in TRL."""
    tokens: int | None = Field(None, ge=1)
    """Stop at the end of the step in which this many tokens are reached (reflection and resampling included)."""
