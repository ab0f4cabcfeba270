"""verl's config for tests, and R³'s settings as verl's trainers take them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from r3.integrations.verl.config import VerlSettings, checked, conflicts_of_v0, conflicts_of_v1
from tests.integrations.verl.running import overrides


@cache
def composed() -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides(Path("folder")))


def verl_config(folder: Path, *more: str) -> Any:
    """verl's config with the contract's overrides and more of them, without composing it anew (a second each time)."""
    config = copy.deepcopy(composed())
    for override in (f"actor_rollout_ref.model.path={folder / 'model'}", *more):
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


TRAINERS = {"v1": conflicts_of_v1, "v0": conflicts_of_v0}


def taken(config: Any, trainer: str = "v1") -> VerlSettings:
    """The settings as one of verl's trainers takes them."""
    return checked(config, TRAINERS[trainer](config))
