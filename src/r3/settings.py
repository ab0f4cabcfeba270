"""The base of all settings, and the sections of the rooms that have only one: buffer, run, evaluate. The others live in
their rooms.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MOST = 2**53
"""No whole number of a setting may be above this: what floats, torch and SQLite all hold exactly."""
_NUMBERS = {str(kind) for kind in (int, float, int | None, float | None)}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, the docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """What pydantic would take for something else, or nothing behind it could use, is refused."""
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and annotation in _NUMBERS:
            raise ValueError("must be a number, not true or false")
        if isinstance(value, str) and not _is_text(value):
            raise ValueError("holds a zero byte or half a character (a lone surrogate)")
        if isinstance(value, int | float) and MOST < abs(value) < math.inf:
            raise ValueError(f"beyond {MOST:,}")
        return value


class Switchable(Settings):
    """A mechanism that can be turned off: `replay: off` means `replay: {enabled: false}`."""

    enabled: bool = True
    """Whether the mechanism acts at all."""

    @model_validator(mode="before")
    @classmethod
    def _accept_on_off(cls, given: Any) -> Any:
        if isinstance(given, bool):
            return {"enabled": given}
        if isinstance(given, str) and given.lower() in ("on", "off"):
            return {"enabled": given.lower() == "on"}
        return given


class BufferSettings(Settings):
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""
    successes_from: str | None = None
    """Directory of an earlier run of r3 train on the same problems with the same tokenizer: its right answers are
    replayed where this run has too few of its own. It is only read; {seed} in it is this run's seed."""


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


class EvaluateSettings(Settings):
    """Held-out accuracy under the plain prompt, during and after training."""

    every: int = Field(0, ge=0)
    """Evaluate every n-th step; 0 only before and after."""
    every_tokens: int = Field(0, ge=0)
    """Evaluate each time this many more tokens have been generated in training; 0 to go by steps alone."""
    samples: int = Field(1, ge=1, le=100_000)
    """Answers to each held-out problem; with several, pass@1 is their mean and pass@k is reported for k = samples."""
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    """Longest held-out answer, e.g. more than in training, where the limit saves time; None: rollout.max_tokens."""
    temperature: float = Field(1.0, ge=0, le=1e3)
    """Sampling temperature of the evaluation; 0 is greedy."""
