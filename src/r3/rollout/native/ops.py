"""The paged cache, and the two operations of a decoding step that are ours: attend over pages, the newest key included,
and draw tokens.

`PagedCache` has the tensors behind the pages: keys and values of every layer, taken from and given back to the device.
`TritonOps` runs on CUDA, `cpu.CpuOps` on a CPU; `TorchOps` says the same in plain torch, on any device: what the
others are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from r3.rollout import Sampling
from r3.rollout.sampling import draw

PAGE = 64
"""Tokens per page: half a page of each row lies idle on average, and 64 keys are what the kernel reads at a time."""
VECTOR = 64
"""Bytes of a vector register."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's keys and values take."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    page: int = PAGE

    @classmethod
    def of(cls, model: PreTrainedModel, page: int = PAGE) -> CacheShape:
        config = model.config.get_text_config(decoder=True)
        queries = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // queries
        heads = getattr(config, "num_key_value_heads", None) or queries
        return cls(config.num_hidden_layers, heads, size, model.dtype, page)

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.page * self.heads * self.head_size * self.dtype.itemsize


class PagedCache:
    """Keys and values by layer, [pages · page, heads, head size]; `bases` holds their addresses for the kernels."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bases = torch.zeros(shape.layers, 2, dtype=torch.int64, device=device)

    @property
    def pages(self) -> int:
        return len(self.keys[0]) // self.shape.page if self.keys else 0

    def allocate(self, pages: int) -> None:
        """Take the memory, all zeros: the kernels read whole pages, and unset memory may hold NaN."""
        self.free()
        size = (pages * self.shape.page, self.shape.heads, self.shape.head_size)
        for store in (self.keys, self.values):
            store += [_zeros(size, self.shape.dtype, self.device) for _ in range(self.shape.layers)]
        addresses = [[k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)]
        self.bases.copy_(torch.tensor(addresses))

    def free(self) -> None:
        """Give the memory back."""
        self.keys.clear()
        self.values.clear()

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) in every layer; all are read before any is written."""
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.device).T
        for store in (*self.keys, *self.values):
            pages = store.view(-1, self.shape.page, *store.shape[1:])
            pages.index_copy_(0, target, pages.index_select(0, source))


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only where they are written, and begin where a vector's load does."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    numbers = math.prod(size)
    whole = torch.from_numpy(np.zeros(numbers * dtype.itemsize + VECTOR, np.uint8))
    start = -whole.data_ptr() % VECTOR
    return whole[start : start + numbers * dtype.itemsize].view(dtype).view(size)


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """What a decoding step reads and writes, by lane. The tensors stay where they are: CUDA graphs know them."""

    token: Tensor  # [lanes] int64: the newest, to be fed in
    position: Tensor  # [lanes] int64: its position
    length: Tensor  # [lanes] int32: keys of the row, the newest token's included
    table: Tensor  # [lanes, pages of the longest row] int32
    uniforms: Tensor  # [lanes, steps] float64
    step: Tensor  # [1] int32: which step of the turn this is
    tokens: Tensor  # [lanes, steps] int32: what was drawn
    logprobs: Tensor  # [lanes, steps] float32
    entropies: Tensor  # [lanes, steps] float32

    @classmethod
    def new(cls, lanes: int, pages: int, steps: int, device: torch.device) -> Lanes:
        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            token=zeros(lanes, dtype=torch.int64),
            position=zeros(lanes, dtype=torch.int64),
            length=zeros(lanes, dtype=torch.int32),
            table=zeros(lanes, pages, dtype=torch.int32),
            uniforms=zeros(lanes, steps, dtype=torch.float64),
            step=zeros(1, dtype=torch.int32),
            tokens=zeros(lanes, steps, dtype=torch.int32),
            logprobs=zeros(lanes, steps, dtype=torch.float32),
            entropies=zeros(lanes, steps, dtype=torch.float32),
        )

    def first(self, n: int) -> Lanes:
        """The first n lanes, as views."""
        by_lane = {f.name: getattr(self, f.name)[:n] for f in fields(self) if f.name != "step"}
        return Lanes(**by_lane, step=self.step)


@dataclass(frozen=True, slots=True)
class Split:
    """How attention is cut into programs: so many chunks of so many keys."""

    chunks: int
    keys: int


class New(NamedTuple):
    """What a layer computed for each lane's newest token. [lanes, heads, D]"""

    query: Tensor
    key: Tensor
    value: Tensor


class How(NamedTuple):
    """The layer's attention: its scale, and how many keys it sees (None: all)."""

    scale: float
    window: int | None


class Ops(Protocol):
    in_sizes: bool
    """Whether lanes come in a few sizes and products side by side, as CUDA graphs and short kernels want it."""

    def check(self, shape: CacheShape) -> None:
        """Refuse, as a ValueError, a cache that these operations cannot work on."""

    def store(self, key: Tensor, value: Tensor, layer: int, cache: PagedCache, slots_T: Tensor) -> None:
        """Write the keys and values of a prefill, [T, heads, D], into their slots."""

    def attend(self, new: New, layer: int, cache: PagedCache, lanes: Lanes, split: Split, how: How) -> Tensor:
        """Write each lane's newest key and value behind its others, and attend over all. [lanes, query heads, D]"""

    def draw(self, logits: Tensor, lanes: Lanes, sampling: Sampling, last_position: int) -> None:
        """Draw each lane's next token, note it with its log-prob and entropy, and move the lane on."""


class TorchOps:
    """The reference."""

    in_sizes = True

    def check(self, shape: CacheShape) -> None:
        pass

    def store(self, key: Tensor, value: Tensor, layer: int, cache: PagedCache, slots_T: Tensor) -> None:
        cache.keys[layer].index_copy_(0, slots_T, key)
        cache.values[layer].index_copy_(0, slots_T, value)

    def attend(self, new: New, layer: int, cache: PagedCache, lanes: Lanes, split: Split, how: How) -> Tensor:
        at, page = torch.arange(int(lanes.length.max()), device=new.query.device), cache.shape.page
        slots = lanes.table[:, at // page].long() * page + at % page  # [lanes, longest]
        newest = slots.gather(1, (lanes.length[:, None] - 1).long()).squeeze(1)
        cache.keys[layer].index_copy_(0, newest, new.key)
        cache.values[layer].index_copy_(0, newest, new.value)
        behind = lanes.length[:, None] - 1 - at
        seen = (behind >= 0) if how.window is None else (behind >= 0) & (behind < how.window)
        key, value = (x[slots].transpose(1, 2) for x in (cache.keys[layer], cache.values[layer]))
        groups = new.query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            new.query.unsqueeze(2), key, value, attn_mask=seen[:, None, None], scale=how.scale
        )
        return out.squeeze(2)

    def draw(self, logits: Tensor, lanes: Lanes, sampling: Sampling, last_position: int) -> None:
        at = lanes.step.long()
        drawn = draw(logits, lanes.uniforms.index_select(1, at).squeeze(1), sampling)
        for kept, new in zip((lanes.tokens, lanes.logprobs, lanes.entropies), drawn, strict=True):
            kept.index_copy_(1, at, new.to(kept.dtype)[:, None])
        lanes.token.copy_(drawn.tokens)
        lanes.position.add_(1).clamp_(max=last_position)
        lanes.length.add_(1)


class TritonOps(TorchOps):
    """The same by kernels; sampling that filters (top-k, top-p) stays in torch, where its sort is."""

    # Best of 144 combinations at three shapes on an H200, where attention reads the cache at 3.9 to 4.3 TB/s.
    BLOCK = 64  # keys read at a time
    WARPS = 2
    STAGES = 4
    VOCABULARY_BLOCK = 8192

    def __init__(self) -> None:
        from r3.rollout.native import kernels  # Triton is there where CUDA is

        self._kernels = kernels

    def attend(self, new: New, layer: int, cache: PagedCache, lanes: Lanes, split: Split, how: How) -> Tensor:
        query, key, value = new
        n, queries, size = query.shape
        heads, page = cache.shape.heads, cache.shape.page
        out = torch.empty(n, queries, size, dtype=query.dtype, device=query.device)
        several = split.chunks > 1
        parts = n * queries * split.chunks
        partial = torch.empty(parts * size, dtype=torch.float32, device=query.device) if several else out
        mass = torch.empty(parts, dtype=torch.float32, device=query.device) if several else out
        precise = query.dtype == torch.float32
        self._kernels.attend[(heads, n, split.chunks)](
            query, key, value, cache.bases[layer], lanes.table, lanes.length, out, partial, mass,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], lanes.table.stride(0),
            how.scale, split.keys, how.window or 2**30,
            HEADS=heads, GROUP=queries // heads, GROUP_PADDED=max(16, _padded(queries // heads)),
            D=size, D_PADDED=_head(size), PAGE=page, BLOCK=min(page, self.BLOCK // 2 if precise else self.BLOCK),
            SPLIT=several, PRECISION="ieee" if precise else "tf32", STAGES=2 if precise else self.STAGES,
            num_warps=self.WARPS,
        )  # fmt: skip
        if several:
            self._kernels.combine[(n * queries,)](
                partial, mass, out, split.chunks,
                D=size, D_PADDED=_head(size), SPLITS_PADDED=_padded(split.chunks), num_warps=1,
            )  # fmt: skip
        return out

    def draw(self, logits: Tensor, lanes: Lanes, sampling: Sampling, last_position: int) -> None:
        if sampling.top_k > 0 or sampling.top_p < 1:
            super().draw(logits, lanes, sampling, last_position)
            return
        n, vocabulary = logits.shape
        blocks = -(-vocabulary // self.VOCABULARY_BLOCK)
        greedy = sampling.temperature == 0
        warmth = 1.0 if greedy else 1 / sampling.temperature

        def of_blocks(dtype: torch.dtype) -> Tensor:
            return torch.empty(n, blocks, dtype=dtype, device=logits.device)

        parts: Any = (of_blocks(torch.float32), of_blocks(torch.int32), *(of_blocks(torch.float32) for _ in range(2)))
        self._kernels.measure[(blocks, n)](logits, *parts, vocabulary, warmth, BLOCK=self.VOCABULARY_BLOCK, num_warps=8)
        self._kernels.draw[(n,)](
            logits, *parts, lanes.uniforms, lanes.step, lanes.token, lanes.position, lanes.length,
            lanes.tokens, lanes.logprobs, lanes.entropies,
            vocabulary, warmth, blocks, lanes.uniforms.stride(0), last_position,
            BLOCK=self.VOCABULARY_BLOCK, BLOCKS_PADDED=_padded(blocks), GREEDY=greedy, num_warps=8,
        )  # fmt: skip


def _padded(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _head(size: int) -> int:
    """A head size the tensor cores take."""
    return max(16, _padded(size))
