"""The policy's own modelling code over the paged cache: attention swapped, everything else as transformers wrote it.

A forward is one row of tokens, [1, T]: the newest token of every lane when decoding, whole prompts one after the other
when prefilling. Linear layers, norms and rotary embeddings do not care; attention does, and is told by a `Pass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from r3.policy.attention import Layout, attend
from r3.rollout.native.cache import PagedCache
from r3.rollout.native.ops import How, Lanes, New, Ops, Split

PAGED = "r3_paged"


class Pass(Protocol):
    """One forward's attention: stores the new keys and values, [T, heads, D], and attends. [T, query heads, D]"""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPass:
    """Whole prompts, packed; their keys and values go into these slots of the cache."""

    cache: PagedCache
    slots_T: Tensor
    layout: Layout
    ops: Ops

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor:
        self.ops.store(key, value, layer, self.cache, self.slots_T)
        return attend(query, key, value, self.layout, scale, window=window)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePass:
    """One token of every lane."""

    cache: PagedCache
    lanes: Lanes
    ops: Ops
    split: Split

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor:
        return self.ops.attend(New(query, key, value), layer, self.cache, self.lanes, self.split, How(scale, window))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    r3_pass: Pass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, D] → output [1, T, heads, D]."""
    if r3_pass is None:
        raise Unsupported("does not pass the engine's arguments on to its attention")
    if softcap is not None:
        raise Unsupported("soft-caps its attention (as Gemma 2 does)")
    if s_aux is not None:
        raise Unsupported("has attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = r3_pass(q, k, v, module.layer_idx, scale, sliding_window)
    return out.unsqueeze(0), None


class Unsupported(ValueError):
    """The model's attention is not one this engine knows: the rest of a sentence that begins with the model's name."""


AttentionInterface.register(PAGED, paged_attention)
