"""A key-value cache whose rows come and go: stock transformers modelling code reads it like any other cache.

transformers' own `DynamicCache` copies every key and value at every token (it grows by concatenation), and its
sliding-window layers forget where a row began. Here each layer has a little room to write the next tokens in, and keeps
every key: a model with sliding windows masks what it must not see, as it does in training.

Rows are aligned to the right: every row's newest key lies in the last column, so that one column per step serves all
rows; what lies left of a row's first key is padding, which the attention mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

# Columns of room. A full cache is copied into a bigger one every ROOM tokens, beside ROOM reads of it by attention.
ROOM = 64


class RowsOf(NamedTuple):
    """Some rows of a cache, a row possibly several times."""

    cache: Cache
    rows: Sequence[int]


class GrowingLayer(DynamicLayer):
    """One layer's keys and values: `keys` and `values` are the filled part of tensors with room for more columns."""

    # Read by transformers where it builds masks: it then need not look whether a decoding step's mask hides anything,
    # a look that would make the host wait for the device at every step.
    is_compileable = True

    _stores: tuple[Tensor, Tensor] | None = None

    @classmethod
    def holding(cls, key_store: Tensor, value_store: Tensor, columns: int) -> GrowingLayer:
        """A layer over tensors of shape [rows, heads, columns + room, head size]."""
        layer = cls()
        layer.dtype, layer.device = key_store.dtype, key_store.device
        layer._stores = key_store, value_store
        layer.keys, layer.values = key_store[:, :, :columns], value_store[:, :, :columns]
        layer.is_initialized = True
        return layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new columns; all that are there now."""
        if self.keys is None or self.values is None:  # a prefill: it gets room when its rows join a batch
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        key_store, value_store = self._stores or (self.keys, self.values)
        key_store, self.keys = _append(key_store, self.keys, key_states)
        value_store, self.values = _append(value_store, self.values, value_states)
        self._stores = key_store, value_store
        return self.keys, self.values


def _append(store: Tensor, filled: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    start, end = filled.shape[2], filled.shape[2] + new.shape[2]
    if end > store.shape[2]:
        store = _store_like(filled, filled.shape[0], end + ROOM)
        store[:, :, :start] = filled
    store[:, :, start:end] = new
    return store, store[:, :, :end]


def _store_like(part: Tensor, rows: int, columns: int) -> Tensor:
    # Zeros, not garbage: a masked column is weighted with 0, and 0 times a stray NaN would still be NaN.
    return part.new_zeros(rows, part.shape[1], columns, part.shape[3])


def new_cache() -> Cache:
    """An empty cache; the model adds its layers as it first runs."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def regroup(cache: Cache, pieces: Sequence[RowsOf], columns: int) -> None:
    """Make `cache` hold the rows of all pieces, in order: their last `columns` columns, padded on the left if shorter.

    `cache` may be among the pieces. It changes layer by layer, so that no more than one layer is ever held twice.
    """
    chosen = [torch.tensor(piece.rows, device=_states(piece.cache, 0)[0].device) for piece in pieces]
    for i in range(len(pieces[0].cache)):
        keys, values = zip(*(_states(piece.cache, i) for piece in pieces), strict=True)
        layer = GrowingLayer.holding(_join(keys, chosen, columns), _join(values, chosen, columns), columns)
        cache.layers[i : i + 1] = [layer]


def _states(cache: Cache, i: int) -> tuple[Tensor, Tensor]:
    layer = cache.layers[i]
    assert isinstance(layer, GrowingLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _join(parts: Sequence[Tensor], chosen: Sequence[Tensor], columns: int) -> Tensor:
    """The chosen rows of all parts below each other, their right edges at column `columns`, room beyond it."""
    store = _store_like(parts[0], sum(map(len, chosen)), columns + ROOM)
    top = 0
    for part, rows in zip(parts, chosen, strict=True):
        width = min(columns, part.shape[2])
        newest = part[:, :, part.shape[2] - width :]
        store[top : top + len(rows), :, columns - width : columns] = newest[rows.to(part.device)]
        top += len(rows)
    return store
