"""A training run's directory on disk and its progress on screen.

Nothing here imports torch, and `rich`, TensorBoard, W&B and trackio are loaded only when they are used.
"""

from r3.errors import RunError
from r3.run.checkpoints import Checkpoint, Checkpoints
from r3.run.directory import RunDirectory, RunFiles, refuse_run, resume_command
from r3.run.display import Progress
from r3.run.metrics import MetricsLog, Sink, TensorBoardSink, TrackioSink, WandbSink, open_sinks, read_metrics
from r3.run.rollouts import Rollouts
from r3.run.signals import StopRequested

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "Progress",
    "Rollouts",
    "RunDirectory",
    "RunError",
    "RunFiles",
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
