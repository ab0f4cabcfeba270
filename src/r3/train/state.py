"""The content of a checkpoint: the policy in Hugging Face format, and everything else that an exact resume needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from r3.errors import RunError
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.train.loop import Trainer


def save(trainer: Trainer, folder: Path) -> None:
    """Write a checkpoint. All ranks have the same weights and optimiser: any number of processes can go on with it."""
    trainer.updater.policy.save(folder / "policy")
    state = {
        "step": trainer.step,
        "version": trainer.version,
        "position": trainer.position,
        "ahead": trainer.ahead.state(),
        "revisits": trainer.revisits.state(),
        "bad_in_a_row": trainer.updater.bad_in_a_row,
        "optimiser": trainer.updater.optimiser_state(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, folder / "trainer.pt")


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Put a trainer into the state of a checkpoint."""
    state = load_state(trainer.updater.policy, trainer.updater.optimiser, checkpoint)
    trainer.step, trainer.version = state["step"], state["version"]
    trainer.position = trainer.stream.position = state["position"]
    trainer.ahead.load(state.get("ahead"))  # earlier versions had none
    if "revisits" in state:  # earlier versions had none
        trainer.revisits.load(state["revisits"])
    trainer.updater.bad_in_a_row = state["bad_in_a_row"]
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)


def load_state(policy: Policy, optimiser: Optimiser, checkpoint: Path) -> dict[str, Any]:
    """Take over a checkpoint's weights and optimiser; the rest of what it holds."""
    path = checkpoint / "trainer.pt"
    if not path.exists():
        raise RunError(f"{path}: not there; every process of a job must see the run directory at the same path")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if not policy.settings.lora.enabled:  # adapters were loaded with the policy
        policy.load_weights(checkpoint / "policy")
    optimiser.load(state["optimiser"])
    return state
