"""Ragged sequences without padding: packed one after the other, under an attention that cannot leak between them.

A micro-batch is one row of T tokens made of segments. A segment is a whole sequence, or a continuation of another
segment, its prefix: the responses of a group each continue the group's prompt, which then stands in the row once.
Every layer of the model works on that row; only attention needs to know where segments begin and what they continue.
It is registered with transformers under the name `r3_packed` and has two forms of the same function:

- `flash`: torch's variable-length flash kernels, forward and backward, on CUDA in half precision.
- `padded`: each segment in a row of its own, right-padded to the longest, on any device and in any dtype. The padding
  stands after the tokens, so no token ever sees it, and other segments are in other rows: nothing can leak.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

PACKED = "r3_packed"
# Newer releases of torch need a flag when keys have fewer heads than queries; older ones notice it themselves.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the segments of a packed row begin and what each continues."""

    position_T: Tensor
    """Position of each token within its sequence, prefix included."""
    starts_Q: Tensor
    """Where each segment begins in the row, and the row's end. int32, [S + 1]"""
    starts_K: Tensor
    """The same for the keys that each segment sees: its prefix's and its own. int32, [S + 1]"""
    longest_Q: int
    longest_K: int
    key_K: Tensor | None
    """Which tokens of the row those keys are; None where no segment has a prefix: the tokens themselves."""
    index_Q: Tensor
    """For the padded form: flat index of each token into [S, longest_Q]."""
    index_K: Tensor
    """For the padded form: flat index of each key into [S, longest_K]."""

    @property
    def segments(self) -> int:
        return len(self.starts_Q) - 1


def layout_of(
    lengths: Sequence[int], device: torch.device | str = "cpu", *, prefixes: Sequence[int | None] = ()
) -> Layout:
    """The layout of segments of these lengths; `prefixes` names the segment that each continues, if any does.

    >>> layout = layout_of([2, 1, 3], prefixes=[None, 0, 0])
    >>> layout.position_T.tolist()
    [0, 1, 2, 2, 3, 4]
    >>> layout.key_K.tolist()
    [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    """
    prefixes = prefixes or [None] * len(lengths)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    before = [0 if prefix is None else lengths[prefix] for prefix in prefixes]
    seen = [skip + length for skip, length in zip(before, lengths, strict=True)]
    position_T = torch.cat([torch.arange(skip, end) for skip, end in zip(before, seen, strict=True)])
    starts_K = torch.tensor([0, *seen]).cumsum(0)
    index_Q = index_K = _indices(lengths)
    key_K = None
    if any(before):
        spans = [(prefix, segment) for segment, prefix in enumerate(prefixes)]
        key_K = torch.cat([torch.arange(starts[i], starts[i + 1]) for span in spans for i in span if i is not None])
        key_K, index_K = to_device(key_K, device), _indices(seen)
    return Layout(
        to_device(position_T, device),
        to_device(torch.tensor(starts, dtype=torch.int32), device),
        to_device(starts_K.int(), device),
        max(lengths),
        max(seen),
        key_K,
        to_device(index_Q, device),
        to_device(index_K, device),
    )


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Move to the device without making the host wait for it."""
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _indices(lengths: Sequence[int]) -> Tensor:
    """Flat index into [S, longest] of every packed token."""
    longest = max(lengths)
    return torch.cat([torch.arange(i * longest, i * longest + length) for i, length in enumerate(lengths)])


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    # squeeze, not [0]: the gradient of an index is a copy into zeros, that of a view is a view
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = attend(q, k, v, r3_layout, scaling, dropout, sliding_window)
    return out.unsqueeze(0), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each segment and its prefix. All [T, heads, D]; `window` counts the token itself."""
    if layout.key_K is not None:
        key, value = (_gather(x, layout.key_K) for x in (key, value))
    form = flash if flash_takes(query, dropout) else padded
    return form(query, key, value, layout, scale, dropout, window)


def flash_takes(query: Tensor, dropout: float = 0.0) -> bool:
    """Whether torch's variable-length flash kernels support these tensors."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 and dropout == 0


def flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    out: Tensor = varlen_attn(  # type: ignore[assignment]
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        layout.starts_Q,
        layout.starts_K,
        layout.longest_Q,
        layout.longest_K,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_GROUPED,
    )
    return out


def padded(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    q = _unpack(query, layout.index_Q, layout.segments, layout.longest_Q)
    k, v = (_unpack(x, layout.index_K, layout.segments, layout.longest_K) for x in (key, value))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    simple = layout.key_K is None and (window is None or window >= layout.longest_K)
    mask = None if simple else _mask(layout, window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=simple, scale=scale, dropout_p=dropout)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])[layout.index_Q]


def _mask(layout: Layout, window: int | None) -> Tensor:
    """Which keys each query sees, [S, 1, longest_Q, longest_K]: keys are in order, and queries are the last of them."""
    device = layout.starts_Q.device
    skip_S = layout.starts_K.diff() - layout.starts_Q.diff()
    at_Q = skip_S[:, None] + torch.arange(layout.longest_Q, device=device)
    behind = at_Q[:, :, None] - torch.arange(layout.longest_K, device=device)
    return ((behind >= 0) if window is None else (behind >= 0) & (behind < window)).unsqueeze(1)


def _unpack(x: Tensor, place_T: Tensor, segments: int, longest: int) -> Tensor:
    """[T, heads, D] → [S, heads, longest, D], zeros behind each segment."""
    rows = x.new_zeros(segments * longest, *x.shape[1:]).index_copy(0, place_T, x)
    return rows.view(segments, longest, *x.shape[1:]).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """`index_select` whose gradient is summed in float32: summing many responses in bfloat16 loses small terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = x.shape, x.dtype
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, dtype = ctx.like
        total = grads[0].new_zeros(shape, dtype=torch.float32)
        return total.index_add_(0, ctx.saved_tensors[0], grads[0].float()).to(dtype), None


def _gather(x: Tensor, index: Tensor) -> Tensor:
    out: Tensor = _Gather.apply(x, index)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the model to another attention while the block runs."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to packed attention while the block runs.

    The backward pass belongs inside too: gradient checkpointing runs the forward again there.
    """
    with attention_of(model, PACKED):
        yield


def is_packed(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == PACKED)


AttentionInterface.register(PACKED, packed_attention)
