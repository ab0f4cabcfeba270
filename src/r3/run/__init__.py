"""A training run's directory on disk and its progress on screen.

Nothing here imports torch, and `rich`, TensorBoard, W&B and trackio are loaded only when they are used.
"""

from __future__ import annotations

from pydantic import Field

from r3.errors import RunError
from r3.run.checkpoints import Checkpoint, Checkpoints
from r3.run.directory import RunDirectory, RunFiles, refuse_run, resume_command
from r3.run.display import Progress
from r3.run.metrics import MetricsLog, Sink, TensorBoardSink, TrackioSink, WandbSink, open_sinks, read_metrics
from r3.run.rollouts import Rollouts
from r3.run.signals import StopRequested
from r3.settings import Settings

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "Progress",
    "Rollouts",
    "RunDirectory",
    "RunError",
    "RunFiles",
    "RunSettings",
    "Sink",
    "StopRequested",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "open_sinks",
    "read_metrics",
    "refuse_run",
    "resume_command",
]


class RunSettings(Settings):
    """The run directory and what is kept in it."""

    dir: str = "runs/{method}-{task}-{seed}"
    """Where the run is written; {method}, {task} and {seed} are filled in."""
    seed: int = Field(0, ge=0)
    """Seeds everything: data order, sampling, initialisation."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between two checkpoints; one is also written at the end and when the run is stopped."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints are kept."""
    rollouts_every: int = Field(1, ge=0)
    """Save the rollouts of every n-th step; 0 for none."""
    rollouts_groups: int = Field(8, ge=1)
    """How many groups of a saved step keep their texts and per-token numbers; the others keep a summary."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads for torch; None takes one per physical core, within the container's quota."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs r3-rl[wandb])."""
    trackio: bool = False
    """Log to trackio (needs r3-rl[trackio])."""
    project: str = Field("r3", min_length=1)
    """The project at W&B and trackio."""
    name: str | None = Field(None, min_length=1)
    """The run's name at W&B and trackio, by default its directory's name; {method}, {task} and {seed} are filled in."""
    group: str | None = Field(None, min_length=1)
    """The group of runs it belongs to at W&B and trackio, e.g. all seeds of one setting."""
    tags: list[str] = Field(default_factory=list)
    """Tags at W&B; trackio, which has no tags, keeps them in its config."""
