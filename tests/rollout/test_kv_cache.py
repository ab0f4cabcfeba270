"""The cache whose rows come and go, against lists of columns kept by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import Cache

from r3.rollout.causal_lm import ROOM, RowsOf, new_cache, regroup

LAYERS = 2


def filled(rows: int, columns: int, seed: int) -> tuple[Cache, torch.Tensor]:
    """A cache after a prefill, and what it holds: [layers, keys and values, rows, heads, columns, head size]."""
    held = torch.randn(LAYERS, 2, rows, 3, columns, 4, generator=torch.Generator().manual_seed(seed))
    cache = new_cache()
    for layer in range(LAYERS):
        cache.update(held[layer, 0], held[layer, 1], layer)
    return cache, held


def holds(cache: Cache) -> torch.Tensor:
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


@given(st.integers(1, 3), st.integers(1, 2 * ROOM + 3))
def test_appending_is_concatenation(rows: int, steps: int) -> None:
    cache, held = filled(rows, 2, seed=0)
    regroup(cache, [RowsOf(cache, range(rows))], 2)
    new = torch.randn(LAYERS, 2, rows, 3, steps, 4, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        for layer in range(LAYERS):
            key, value = new[layer, :, :, :, step : step + 1]
            keys, values = cache.update(key, value, layer)
    assert torch.equal(holds(cache), torch.cat([held, new], dim=-2))
    assert torch.equal(torch.stack([keys, values]), holds(cache)[-1])
    assert cache.get_seq_length() == 2 + steps


@given(st.data())
def test_regrouping_aligns_chosen_rows_to_the_right(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3))
    caches = [filled(rows, columns, seed) for seed, (rows, columns) in enumerate(sizes)]
    columns = data.draw(st.integers(1, 12))
    chosen = [data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5)) for rows, _ in sizes]
    target = caches[0][0] if data.draw(st.booleans()) else new_cache()
    regroup(target, [RowsOf(cache, rows) for (cache, _), rows in zip(caches, chosen, strict=True)], columns)
    expected = [
        torch.nn.functional.pad(held[:, :, rows], (0, 0, columns, 0))[..., -columns:, :]
        for (_, held), rows in zip(caches, chosen, strict=True)
    ]
    assert torch.equal(holds(target), torch.cat(expected, dim=2))
    assert target.get_seq_length() == columns


def test_a_prefilled_cache_can_be_decoded_from_without_regrouping() -> None:
    cache, held = filled(2, 3, seed=0)
    cache.update(held[0, 0, :, :, :1], held[0, 1, :, :, :1], 0)
    assert torch.equal(cache.layers[0].keys, torch.cat([held[0, 0], held[0, 0, :, :, :1]], dim=-2))
