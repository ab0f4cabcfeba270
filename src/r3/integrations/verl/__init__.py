"""R³ in verl's trainers: V1 as a plugin (`trainer.v1.trainer_mode=r3_sync`), V0 by `python -m r3.integrations.verl.v0`.

`docs/verl.md` is the guide.

verl finds the plugin through its entry points (`verl.plugins`) in every process that imports verl, and says nothing if
that fails: `python -m r3.integrations.verl` tells. The stage methods that the plugin extends change between minor
versions, so only the versions that the tests ran with are accepted.
"""

from __future__ import annotations

import importlib.metadata

TESTED = ("0.9",)
"""Minor versions of verl that the tests ran with."""
KEY = "r3_method"
"""Our section of verl's config. Not `r3`: that name is router replay's there."""
TRAINER = "r3_sync"
V0 = "r3.integrations.verl.v0"
"""The command that runs verl's older trainer, `RayPPOTrainer`, with R³."""
ESTIMATOR = "r3_mixed_group"
REWARD = "r3_reward"
FIX = f"pip install 'r3-rl[verl]' 'verl=={TESTED[-1]}.*'"


def check_version() -> None:
    """ImportError, with the command that helps, unless a tested verl is installed."""
    try:
        installed = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"r3.integrations.verl needs verl, which is not installed: {FIX}") from error
    if ".".join(installed.split(".")[:2]) not in TESTED:
        raise ImportError(
            f"r3.integrations.verl is tested with verl {', '.join(TESTED)}, and {installed} is here: {FIX}"
        )
