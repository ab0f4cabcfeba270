"""The run directory and what is kept in it."""

from __future__ import annotations

from pydantic import Field

from r3.settings import Settings


class RunSettings(Settings):
    """The run directory and what is kept in it."""

    dir: str = "runs/{method}-{task}-{seed}"
    """Where the run is written; {method}, {task} and {seed} are filled in."""
    seed: int = Field(0, ge=0)
    """Seeds everything: data order, sampling, initialisation."""
    checkpoint_every: int = Field(20, ge=1)
    """Write a checkpoint every so many steps, at the end, and when the run is stopped."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints are kept."""
    rollouts_every: int = Field(1, ge=0)
    """Save the rollouts of every so many steps; 0 for none."""
    rollouts_groups: int = Field(8, ge=1)
    """How many groups of such a step are saved with their texts and numbers by token; of the others, a summary."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads for torch; None leaves torch's own choice."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs r3-rl[wandb])."""
    trackio: bool = False
    """Log to trackio (needs r3-rl[trackio])."""
    project: str = Field("r3", min_length=1)
    """The project at W&B and trackio."""
    name: str | None = Field(None, min_length=1)
    """The run's name at W&B and trackio, by default the name of its directory; {method}, {task} and {seed} are filled
    in."""
    group: str | None = Field(None, min_length=1)
    """The group of runs that it belongs to there, e.g. the seeds of one setting."""
    tags: list[str] = Field(default_factory=list)
    """Its tags at W&B; trackio, which has none, keeps them in its config."""
