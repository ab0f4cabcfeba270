"""R³ inside TRL: `R3Trainer(GRPOTrainer)` and `R3Config(GRPOConfig)`. `docs/trl.md` has an example.

TRL is imported on first use. Its trainer's inner methods, which the adapter extends, change between minor versions, so
only the versions that the tests ran with are accepted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

TESTED = ("1.14", "1.15", "1.16")
"""Minor versions of TRL that the tests ran with."""

if TYPE_CHECKING:
    from r3.integrations.trl.config import R3Config
    from r3.integrations.trl.trainer import R3Trainer

__all__ = ["TESTED", "R3Config", "R3Trainer"]

_HOME = {"R3Config": "config", "R3Trainer": "trainer"}


def check_version() -> None:
    """ImportError, with the command that helps, unless a tested TRL is installed."""
    fix = f"pip install 'trl=={TESTED[-1]}.*'"
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"r3.integrations.trl needs TRL, which is not installed: {fix}") from error
    if ".".join(installed.split(".")[:2]) not in TESTED:
        raise ImportError(
            f"r3.integrations.trl is tested with TRL {', '.join(TESTED)}, and {installed} is installed: {fix}"
        )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'r3.integrations.trl' has no attribute {name!r}")
    check_version()
    return getattr(importlib.import_module(f"r3.integrations.trl.{_HOME[name]}"), name)
