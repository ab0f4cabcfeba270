"""How single layers of the policy are computed: the LM head without whole logits, layers compiled on a card, matrix
products through oneDNN on a CPU.

The LM head in chunks of positions: it gives log-probs and entropies and never keeps all logits.

At 16,384 tokens and a vocabulary of 152k, whole logits would take 5 GB in bfloat16 and twice that in float32, several
times over. Here a chunk's logits exist while it is measured, and once more in the backward pass, where they turn into
their own gradient: the distribution minus the token that was drawn.

torch.compile layer by layer: one compilation, of seconds, serves all layers and every length.

The layers keep their code and parameters; inside `with layers():` their calls go to the compiled form. torch caches
compilations on disk for the next run (in TORCHINDUCTOR_CACHE_DIR).

Linear layers on a CPU through oneDNN: the same float32 products, from the same weights in place.

torch hands float32 products to MKL, which leaves half of an AMD core's vector width unused: on an EPYC of 2025 it
reaches 115 GFLOP/s per core where oneDNN, which torch also brings, reaches 250 (benchmarks/NOTES.md has the table).
While `with onednn(model):` runs, the model's plain linear layers call oneDNN, forward and backward. What they are and
hold stays as it is.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

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


# ------------------------------------------------------------- compiled layers


log = logging.getLogger(__name__)


class CompiledLayers:
    """The decoder layers of a model, compiled for one use (`purpose` names it in the log)."""

    def __init__(self, model: PreTrainedModel, purpose: str) -> None:
        self._purpose = purpose
        self._layers: list[nn.Module] = list(layers_of(model))
        self._compiled: list[Callable[..., Any]] = []
        self._seen = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the compiled layers while the block runs. The first block, which compiles, is timed."""
        if not self._compiled:
            self._compiled = [torch.compile(layer._call_impl, dynamic=True) for layer in self._layers]
        originals = [layer._compiled_call_impl for layer in self._layers]
        started = time.perf_counter()
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer._compiled_call_impl = compiled
        try:
            # Every kind of call (a length of one, gradients on or off) is a compilation of its own; the default limit
            # of eight would silently leave the rest uncompiled.
            with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
                yield
        finally:
            for layer, original in zip(self._layers, originals, strict=True):
                layer._compiled_call_impl = original
        if not self._seen:
            self._seen = True
            log.info("compiled the layers for the %s in %.1f s", self._purpose, time.perf_counter() - started)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks of a decoder."""
    lists = [module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(f"{type(model).__name__} has {len(lists)} lists of layers, not one; set model.compile=false")
    return lists[0]


# ------------------------------------------------------ linear layers on a CPU


LEAST = 2**19
"""Multiplications below which a product goes to MKL: oneDNN takes some six microseconds more to begin."""


X86 = ("x86_64", "amd64")


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
    free = "forward" not in vars(layer)  # or it is in use already, by a block around this one
    return free and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"


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
