"""Ragged sequences without padding: packed one after the other, under an attention that cannot leak between them.

A micro-batch is one row of T tokens holding S whole sequences. Every layer of the model works on that row; only the
attention needs to know where sequences begin. `packed_attention` is registered with transformers under the name
`r3_packed`: inside it each sequence is moved to a row of its own, right-padded to the longest, and masked causally. The
padding stands after the tokens, so no token ever sees it, and other sequences are in other rows: nothing can leak.
Micro-batches hold sequences of like length (`pack` sorts them), so the padding inside attention costs little. It runs
on any device and differentiates as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

PACKED = "r3_packed"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each token of a packed row stands when every sequence has a row of its own."""

    place_T: Tensor
    """Flat index into [S, longest]."""
    sequences: int
    longest: int


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches (as indices) of at most `budget` tokens each, longest sequences first; a longer one goes alone.

    >>> pack([3, 9, 4, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def layout_of(lengths: Sequence[int], device: torch.device) -> tuple[Layout, Tensor]:
    """The layout of sequences of these lengths, and the position of each token within its sequence. [T]"""
    lengths_S = torch.tensor(lengths)
    starts_S = lengths_S.cumsum(0) - lengths_S
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
    position_T = torch.arange(int(lengths_S.sum())) - starts_S[sequence_T]
    longest = int(lengths_S.max())
    place_T = sequence_T * longest + position_T
    return Layout(place_T.to(device), len(lengths), longest), position_T.to(device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    r3_layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over one packed row: query [1, heads, T, D] → output [1, T, heads, D]."""
    if r3_layout is None:
        raise ValueError(
            f"{type(module).__name__} did not pass the packing on to its attention; "
            "this architecture cannot be trained packed: please report it"
        )
    if softcap is not None:
        raise ValueError("attention logit soft-capping (Gemma 2) is not supported by the packed update")
    q, k, v = (_unpack(x[0], r3_layout) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = None
    if sliding_window is not None and sliding_window < r3_layout.longest:
        at = torch.arange(r3_layout.longest, device=q.device)
        mask = (at[:, None] >= at[None, :]) & (at[:, None] - at[None, :] < sliding_window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout
    )
    flat = out.transpose(1, 2).reshape(-1, *out.shape[1:2], out.shape[3])  # [S · longest, heads, D]
    return flat[r3_layout.place_T].unsqueeze(0), None


def _unpack(x: Tensor, layout: Layout) -> Tensor:
    """[heads, T, D] → [S, heads, longest, D], zeros behind each sequence."""
    heads, _, width = x.shape
    rows = x.new_zeros(layout.sequences * layout.longest, heads, width)
    rows = rows.index_copy(0, layout.place_T, x.transpose(0, 1))
    return rows.view(layout.sequences, layout.longest, heads, width).transpose(1, 2)


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """The model with packed attention while the block runs, with its own attention again afterwards.

    The backward pass belongs inside too: gradient checkpointing runs the forward again there.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(PACKED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def is_packed(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == PACKED)


AttentionInterface.register(PACKED, packed_attention)
