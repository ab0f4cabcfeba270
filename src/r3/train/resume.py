"""Which settings a resumed run may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from r3.config import Config, apply_override, validate
from r3.errors import ConfigError
from r3.run import RunFiles

# How long the run goes on, what it keeps and shows, and where it holds it. Anything else would be another experiment.
MAY_CHANGE = (
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.shard",
    "run.",
    "evaluate.every",
    "rollout.max_rows",
    "rollout.server",
)
MAY_NOT_CHANGE = ("run.seed",)


def resumed_config(path: Path, *, given: Config | None = None, overrides: Sequence[str] = ()) -> Config:
    """The run's own config with overrides, or `given` (of a recipe) where it differs only in what may change."""
    files = RunFiles(path)
    files.read_info()
    saved = yaml.safe_load(files.read_config())
    before = validate(saved)
    if given is None:
        for override in overrides:
            apply_override(saved, override)
        given = validate(saved)
    changed = [key for key, value in _flat(given.model_dump()).items() if value != _flat(before.model_dump()).get(key)]
    refused = [key for key in changed if key in MAY_NOT_CHANGE or not key.startswith(MAY_CHANGE)]
    if refused:
        raise ConfigError(
            f"{path} was made with other settings ({', '.join(sorted(refused))}); resume it without them, or start a "
            "new run in another run.dir"
        )
    return given


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
