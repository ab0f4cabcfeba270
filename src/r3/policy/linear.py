"""Linear layers on a CPU through oneDNN: the same float32 products, from the same weights in place.

torch hands float32 products to MKL, which leaves half of an AMD core's vector width unused: on an EPYC of 2025 it
reaches 115 GFLOP/s per core where oneDNN, which torch also brings, reaches 250 (benchmarks/NOTES.md has the table).
While `with onednn(model):` runs, the model's plain linear layers call oneDNN, forward and backward. What they are and
hold stays as it is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X86 = ("x86_64", "amd64")
LEAST = 2**19
"""Multiplications below which a product goes to MKL: oneDNN takes some six microseconds more to begin."""


def available() -> bool:
    """Whether this torch has oneDNN's linear layer for an x86 CPU."""
    return (
        platform.machine().lower() in X86
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16, as far as torch tells (of x86 alone)."""
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    known = [has for has in asked if has is not None]
    return platform.machine().lower() not in X86 or not known or any(has() for has in known)


@contextmanager
def onednn(model: nn.Module) -> Iterator[None]:
    """The model's linear layers through oneDNN while the block runs, where they are float32 on a CPU.

    With gradient checkpointing the backward pass belongs inside too: it runs the forward again.
    """
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and _takes(layer)] if available() else []
    for layer in layers:
        layer.forward = partial(linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own is there again


def _takes(layer: nn.Linear) -> bool:
    own = "forward" not in vars(layer)  # or it is in use already, by a block around this one
    return own and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What `layer(x)` is, by the faster way for its size."""
    weight, bias = layer.weight, layer.bias
    if x.dtype != torch.float32 or x.numel() * len(weight) < LEAST:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; matrices may be transposed in memory."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()).view(x.shape) if of_x else None,
            _product(grad.t(), x.reshape(-1, x.shape[-1]).t()) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
