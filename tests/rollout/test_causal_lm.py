"""A causal LM one token at a time: attention that shares heads of keys, against attention written out in float64; and
the cache whose rows come and go, against lists of columns kept by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.cache_utils import Cache

from r3.rollout import Request, Sampling
from r3.rollout.causal_lm import GROUPED, ROOM, RowsOf, grouped_attention, new_cache, regroup
from r3.rollout.transformers import TransformersEngine

from .models import answers, build, requests_of


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[tokens, heads, D] of one row: each query head on its own, over the keys it sees."""
    groups = len(query) // len(key)
    out = torch.zeros(query.shape[1], len(query), query.shape[2], dtype=torch.float64)
    for head in range(len(query)):
        for token in range(query.shape[1]):
            scores = [
                float(query[head, token].double() @ k.double()) * scale if s else -math.inf
                for k, s in zip(key[head // groups], seen[token], strict=True)
            ]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            out[token, head] = weights @ value[head // groups].double()
    return out


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 1, 3]), st.data())
def test_it_is_attention(rows: int, kv_heads: int, groups: int, tokens: int, data: st.DataObject) -> None:
    columns = data.draw(st.integers(tokens, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    query = torch.randn(rows, kv_heads * groups, tokens, 4, generator=generator)
    store = torch.randn(2, rows, kv_heads, columns + 5, 4, generator=generator)  # with room behind, as the cache has
    key, value = store[:, :, :, :columns]
    starts = torch.tensor([data.draw(st.integers(0, columns - tokens)) for _ in range(rows)])
    at = torch.arange(columns)
    seen = (at >= starts[:, None, None]) & (at <= torch.arange(columns - tokens, columns)[:, None])
    module = nn.Module().eval()
    module.num_key_value_groups = groups  # type: ignore[assignment]  # what transformers' attention asks of its module
    out, _ = grouped_attention(module, query, key, value, seen[:, None], scaling=0.5)
    assert out.shape == (rows, tokens, kv_heads * groups, 4)
    for row in range(rows):
        expected = by_hand(query[row], key[row], value[row], seen[row], 0.5)
        assert torch.allclose(out[row].double(), expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_the_model_keeps_its_own_attention_outside_of_decoding(architecture: str) -> None:
    model, sampling = build(architecture), Sampling(3, ())
    own = model.config._attn_implementation
    assert own == "sdpa"
    stream = TransformersEngine(model, max_rows=4).generate(requests_of(), sampling)
    next(stream)
    assert model.config._attn_implementation == GROUPED
    stream.close()
    assert model.config._attn_implementation == own


def test_a_model_with_another_attention_keeps_it() -> None:
    sdpa, eager = build("qwen2"), build("qwen2")
    eager.set_attn_implementation("eager")
    requests = [Request(request.prompt, 2, request.seed) for request in requests_of()]
    got, expected = (
        answers(TransformersEngine(model, max_rows=5), requests, Sampling(12, ())) for model in (eager, sdpa)
    )
    assert eager.config._attn_implementation == "eager"
    for key, response in got.items():
        assert response.tokens.tolist() == expected[key].tokens.tolist()
        assert response.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


# The cache.

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
