"""What a verl run's record says beside the method's results: its settings, and what verl measures of its update."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from r3.integrations.common import Described
from r3.integrations.verl import KEY
from r3.integrations.verl.config import VerlSettings
from r3.method.settings import MethodSettings

TOLD = {
    "actor/pg_loss": "update/loss",
    "actor/grad_norm": "update/grad_norm",
    "actor/lr": "update/learning_rate",
    "actor/entropy": "update/entropy",
}
"""verl's names of what r3's own loop measures too."""


def described(config: DictConfig, settings: VerlSettings, *, total_steps: int) -> Described:
    """The run: the method's settings as they are resolved, and all of verl's."""
    whole: Any = OmegaConf.to_container(config, resolve=False)
    plugin = whole.pop(KEY, {})
    tree, rollout = settings.model_dump(mode="json"), config.actor_rollout_ref.rollout
    limit = int(config.data.max_response_length)
    sections = {
        "model": {"path": str(config.actor_rollout_ref.model.path)},
        "method": {name: tree[name] for name in MethodSettings.model_fields},
        "rollout": {"group_size": int(rollout.n), "max_tokens": limit, "temperature": float(rollout.temperature)},
        KEY: plugin,
        "verl": whole,
    }
    return Described(
        method=settings,
        settings=sections,
        defaults={},
        versions={"verl": metadata.version("verl")},
        limit=limit,
        total_steps=total_steps,
        seed=settings.seed,
        rollouts_every=settings.rollouts_every,
        rollouts_groups=settings.rollouts_groups,
    )


def told_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What verl measured, under the names of r3's metrics."""
    return {ours: float(np.mean(metrics[theirs])) for theirs, ours in TOLD.items() if theirs in metrics}
