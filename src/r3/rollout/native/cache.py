"""The tensors behind the pages: keys and values of every layer, taken from and given back to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

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
