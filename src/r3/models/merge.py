"""Merge LoRA adapters into their base model, so that anything that loads a Hugging Face folder can use the result."""

from __future__ import annotations

from pathlib import Path

from r3.errors import ConfigError
from r3.policy.adapters import adapters_in
from r3.policy.model import Policy
from r3.policy.settings import ModelSettings


def merge(folder: Path, to: Path, *, base: str | None = None) -> str:
    """Write the merged model of an adapter folder to `to`; returns what was merged. `base`: where its base model is."""
    settings = ModelSettings(path=str(folder), device="cpu")
    adapters = adapters_in(str(folder), settings) if folder.is_dir() else None
    if adapters is None:
        runs = sorted(folder.glob("checkpoints/step-*/policy")) if folder.is_dir() else []
        hint = f"; a run's are in its checkpoints: {runs[-1]}" if runs else ""
        raise ConfigError(f"{folder}: holds no LoRA adapters (adapter_config.json), so there is nothing to merge{hint}")
    policy = Policy.load(settings, base=base)
    policy.save(to)
    return f"{adapters if base is None else f'LoRA adapters (rank {adapters.config.r}) of {base}'}"
