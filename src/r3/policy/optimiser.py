"""AdamW with float32 state for parameters of any type, a schedule, clipping, and a guard against bad gradients.

Parameters in bfloat16 get a float32 master copy that AdamW steps; the result is rounded back into the parameters, which
the rollout engine reads in place. Their gradients are summed in float32 as each micro-batch's backward makes them, and
not kept in bfloat16. Parameters in float32 are stepped directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from r3.policy import OptimiserSettings


@torch.no_grad()
def _into(master: Tensor, parameter: Tensor) -> None:
    """Add a gradient that this backward has completed to its master's."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def learning_rate(update: int, total: int, settings: OptimiserSettings) -> float:
    """The rate of update number `update` (from 0): linear warm-up to the peak, then the chosen decay.

    >>> s = OptimiserSettings(learning_rate=1.0, warmup_updates=2, decay="linear")
    >>> [learning_rate(u, 6, s) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    peak, warmup = settings.learning_rate, settings.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    if settings.decay == "linear":
        return peak * (1 - done)
    if settings.decay == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


class Optimiser:
    """Steps the trainable parameters; `step` returns the gradient norm, or None for an update that was skipped."""

    def __init__(self, parameters: Iterable[Tensor], settings: OptimiserSettings, total_updates: int) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_into, master))
        self.settings = settings
        self.total_updates = total_updates
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            **({"fused": True} if self._on_cuda() else {"foreach": True}),
        )

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """The gradient of every master, zeros where this process has none: what all processes exchange."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters if master.grad is not None]

    def step(self, update: int) -> tuple[float, float] | None:
        """One update from the accumulated gradients: (gradient norm, learning rate), or None if they are not finite.

        A skipped update leaves parameters and state as they were.
        """
        norm = self._clip()
        rate = learning_rate(update, self.total_updates, self.settings)
        finite = math.isfinite(norm)
        if finite:
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            self._write_back()
        self.clear()
        return (norm, rate) if finite else None

    def _clip(self) -> float:
        """Scale gradients down to the largest norm allowed. Returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.max_grad_norm))

    def _on_cuda(self) -> bool:
        return bool(self.masters) and all(master.is_cuda for master in self.masters)

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def _separate_masters(self) -> list[Tensor]:
        """The masters of parameters that are not float32."""
        return [m for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]

    def clear(self) -> None:
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def state(self) -> dict[str, Any]:
        """Everything an exact resume needs: AdamW's moments, and the masters where they are not the parameters."""
        return {"adamw": self.adamw.state_dict(), "masters": self._separate_masters()}

    def load(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for master, saved in zip(self._separate_masters(), state["masters"], strict=True):
            master.copy_(saved)
        self._write_back()
