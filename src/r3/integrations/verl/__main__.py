"""`python -m r3.integrations.verl`: whether verl knows the plugin here. Run it on every node before a long run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

from r3.integrations.verl import ESTIMATOR, KEY, REWARD, TRAINER, check_version


def missing() -> str | None:
    """What to do so that verl finds the plugin; None if it did."""
    check_version()
    if KEY not in {found.name for found in importlib.metadata.entry_points(group="verl.plugins")}:
        return "r3 is not installed as a package here, where verl looks for plugins: pip install 'r3-rl[verl]'"
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    if importlib.util.find_spec("trl") is not None and not _trl_is_old():
        return (
            "TRL is installed here, and verl's FSDP workers stop at a class that TRL no longer has (found in "
            "verl 0.9.1 with TRL 1.16): pip uninstall trl, or give verl an environment of its own"
        )
    if TRAINER in TRAINER_REGISTRY and ESTIMATOR in ADV_ESTIMATOR_REGISTRY and REWARD in REWARD_MANAGER:
        return None
    importlib.import_module("r3.integrations.verl.plugin")  # raises what verl kept to itself
    return f"verl loads no plugins here: unset VERL_USE_EXTERNAL_PLUGINS, or name {KEY} in it"


def _trl_is_old() -> bool:
    """Whether this TRL has the class that verl patches wherever it finds TRL."""
    for module in ("trl.experimental.ppo", "trl"):
        try:
            if hasattr(importlib.import_module(module), "AutoModelForCausalLMWithValueHead"):
                return True
        except ImportError:
            continue
    return False


def main() -> int:
    """0 if all is registered; 1, with what to do, if not."""
    try:
        problem = missing()
    except Exception as error:  # noqa: BLE001  # told to the user, whatever it is
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        print(f"r3: {problem}", file=sys.stderr)
        return 1
    print(f"verl {importlib.metadata.version('verl')} knows {TRAINER}, {ESTIMATOR} and {REWARD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
