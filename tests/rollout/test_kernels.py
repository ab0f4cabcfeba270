"""The Triton kernels against their reference in torch: on the card where there is one, else in Triton's interpreter.

Covers r3.rollout.native.ops.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it before Triton is imported"
pytest.importorskip("triton", reason="Triton is not installed (it comes with torch for CUDA, and with r3-rl[dev])")

from r3.rollout import Sampling
from r3.rollout.native.ops import CacheShape, How, Lanes, New, PagedCache, Split, TorchOps, TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_cache(shape: CacheShape, pages: int) -> PagedCache:
    cache = PagedCache(shape, DEVICE)
    cache.allocate(pages)
    for store in (*cache.keys, *cache.values):
        store.copy_(torch.randn(store.shape))
    return cache


def twin(cache: PagedCache) -> PagedCache:
    other = PagedCache(cache.shape, DEVICE)
    other.allocate(cache.pages)
    for mine, theirs in zip((*other.keys, *other.values), (*cache.keys, *cache.values), strict=True):
        mine.copy_(theirs)
    return other


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("split", [Split(1, 256), Split(4, 64)], ids=["whole", "split"])
@pytest.mark.parametrize(("heads", "group", "size", "page"), [(2, 6, 16, 64), (1, 1, 24, 16), (2, 3, 64, 32)])
def test_attention_over_pages(heads: int, group: int, size: int, page: int, split: Split, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 64, 65, 130, 256])
    lanes_n, width = len(lengths), 256 // page
    cache = random_cache(CacheShape(2, heads, size, torch.float32, page), 1 + lanes_n * width)
    lanes = Lanes.new(lanes_n, width, 4, DEVICE)
    lanes.length.copy_(lengths)
    lanes.table.copy_((torch.randperm(lanes_n * width) + 1).view(lanes_n, width))
    # As the model makes them: heads before tokens in memory, seen the other way round.
    query, key = (torch.randn(heads * g, lanes_n, size, device=DEVICE).transpose(0, 1) for g in (group, 1))
    new = New(query, key, torch.randn(lanes_n, heads, size, device=DEVICE))
    other = twin(cache)
    got = TritonOps().attend(new, 1, cache, lanes, split, How(size**-0.5, window))
    expected = TorchOps().attend(new, 1, other, lanes, split, How(size**-0.5, window))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((*other.keys, *other.values), (*cache.keys, *cache.values), strict=True):
        assert torch.equal(mine, theirs), "the newest key and value are in their place, and nothing else moved"


@pytest.mark.parametrize("vocabulary", [29, 8192, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drawing(vocabulary: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, vocabulary, device=DEVICE) * 3
    logits[0, : vocabulary // 2] = -torch.inf  # tokens that are never drawn, a whole block of them among these
    logits[1] = -1e4
    logits[1, 3] = 0.0  # certainty
    uniforms = torch.rand(7, 4, dtype=torch.float64)
    uniforms[2], uniforms[3] = 0.0, 1 - 2**-53  # the ends of the interval
    results = []
    for ops in (TritonOps(), TorchOps()):
        lanes = Lanes.new(7, 2, 4, DEVICE)
        lanes.uniforms.copy_(uniforms)
        lanes.step.fill_(2)
        lanes.position.fill_(9)
        ops.draw(logits, lanes, Sampling(4, (), temperature=temperature), 9)
        results.append(lanes)
    mine, theirs = results
    for name in ("token", "tokens", "position", "length"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=2e-5)
    assert mine.position.tolist() == [9] * 7, "the last position the model has is not passed"


def test_nan_logits_show_in_the_logprob() -> None:
    logits = torch.randn(2, 50, device=DEVICE)
    logits[1, 7] = torch.nan
    lanes = Lanes.new(2, 1, 1, DEVICE)
    TritonOps().draw(logits, lanes, Sampling(1, ()), 9)
    assert lanes.logprobs.isnan().flatten().tolist() == [False, True]
    assert 0 <= int(lanes.token[1]) < 50


def test_a_moved_cache_is_found_through_its_addresses() -> None:
    torch.manual_seed(1)
    cache = random_cache(CacheShape(1, 1, 16, torch.float32, 16), 3)
    lanes = Lanes.new(1, 2, 1, DEVICE)
    lanes.length.fill_(20)
    lanes.table.copy_(torch.tensor([[2, 1]]))
    new = New(*(torch.randn(1, 1, 16, device=DEVICE) for _ in range(3)))
    before = TritonOps().attend(new, 0, cache, lanes, Split(1, 32), How(0.25, None))
    kept = [(k.clone(), v.clone()) for k, v in zip(cache.keys, cache.values, strict=True)]
    bases = cache.bases.data_ptr()
    cache.allocate(3)
    for (k, v), mine, own in zip(kept, cache.keys, cache.values, strict=True):
        mine.copy_(k)
        own.copy_(v)
    assert cache.bases.data_ptr() == bases
    torch.testing.assert_close(TritonOps().attend(new, 0, cache, lanes, Split(1, 32), How(0.25, None)), before)
