"""The LM head in chunks of positions: it gives log-probs and entropies and never keeps all logits.

At 16,384 tokens and a vocabulary of 152k, whole logits would take 5 GB in bfloat16 and twice that in float32, several
times over. Here a chunk's logits exist while it is measured, and once more in the backward pass, where they turn into
their own gradient: the distribution minus the token that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
LOGITS = {"cpu": 2**26, "cuda": 2**29}
"""Most logits at a time, over all positions of a chunk: 270 MB in float32 on a CPU, 1 GB in bfloat16 on a card."""


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits of hidden states as the model's own forward makes them, a soft cap included."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def chunk_size(vocabulary: int, device: torch.device) -> int:
    """How many positions' logits are held at a time."""
    return max(1, LOGITS.get(device.type, LOGITS["cpu"]) // vocabulary)


def statistics(
    head: Head, hidden_T: Tensor, targets_T: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets (differentiable) and entropies (not) of softmax(head(hidden) / temperature)."""
    size = chunk_size(vocabulary, hidden_T.device)
    parts = [
        _Chunk.apply(hidden, targets, temperature, head)  # type: ignore[no-untyped-call]
        for hidden, targets in zip(hidden_T.split(size), targets_T.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, temperature: float, head: Head) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, targets)
        ctx.temperature, ctx.head = temperature, head
        logprobs, entropies = _fused(hidden.device.type).measure(head(hidden), targets, temperature)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, targets = ctx.saved_tensors
        with torch.enable_grad():  # through the head itself, with its adapters, bias or soft cap
            hidden = hidden.detach().requires_grad_()
            logits = ctx.head(hidden)
        pulled = _fused(hidden.device.type).pull(logits.detach(), targets, grads[0], ctx.temperature)
        torch.autograd.backward(logits, pulled)
        return hidden.grad, None, None, None


def measure(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropies = -(logs.exp() * logs).sum(-1)
    return logs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies


def pull(logits: Tensor, targets: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Gradient of the logits, given that of the targets' log-probs: (one-hot - softmax) · grad / temperature."""
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    drawn = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    return ((drawn.float() - probs) * (grad / temperature).unsqueeze(1)).to(logits.dtype)


class _Fused:
    """The two measurements, plain or each compiled into one pass over the logits."""

    def __init__(self, compiled: bool) -> None:
        self.measure = torch.compile(measure, dynamic=True) if compiled else measure
        self.pull = torch.compile(pull, dynamic=True) if compiled else pull


@cache
def _fused(device: str) -> _Fused:
    return _Fused(compiled=device == "cuda")
