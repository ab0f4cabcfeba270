"""What the record of a TRL run has besides the method's results: its settings, and what TRL logs of its update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from r3.integrations.common.recorder import Described
from r3.integrations.trl.config import R3Config
from r3.method.settings import MethodSettings

TOLD = {"loss": "update/loss", "grad_norm": "update/grad_norm", "learning_rate": "update/learning_rate"}
"""TRL's names of metrics that r3's own loop has too."""


def described(args: R3Config, method: MethodSettings, model: Any, *, total_steps: int) -> Described:
    """The run: the method's settings as they are resolved, and all of TRL's."""
    defaults = {
        field.name: field.default for field in dataclasses.fields(args) if field.default is not dataclasses.MISSING
    }
    limit = int(args.max_completion_length or 0)
    sections = {
        "model": {"path": str(getattr(model.config, "_name_or_path", ""))},
        "method": method.model_dump(mode="json"),
        "rollout": {"group_size": args.num_generations, "max_tokens": limit, "temperature": args.temperature},
        "trl": args.to_dict(),  # type: ignore[no-untyped-call]
    }
    return Described(
        method=method,
        settings=sections,
        defaults={"trl": defaults},
        versions={"trl": metadata.version("trl")},
        limit=limit,
        total_steps=total_steps,
        seed=args.seed,
        rollouts_every=args.r3_rollouts_every,
        rollouts_groups=args.r3_rollouts_groups,
    )


def told_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """What TRL logged, under the names of r3's metrics."""
    return {ours: float(logs[theirs]) for theirs, ours in TOLD.items() if isinstance(logs.get(theirs), int | float)}
