"""The C loops of the native engine on a CPU, against its reference in torch, and how they come to be compiled.

Covers r3.rollout.native.cpu.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from r3.config import Config
from r3.policy import LoraSettings, ModelSettings
from r3.policy.model import Policy
from r3.policy.source import quiet
from r3.rollout import Sampling
from r3.rollout.native import NativeEngine, cpu
from r3.rollout.native.cpu import CpuOps, Unavailable, knows
from r3.rollout.native.ops import CacheShape, How, Lanes, New, PagedCache, Split, TorchOps
from r3.rollout.transformers import TransformersEngine
from r3.train.build import make_engine

from .models import answers, build, requests_of

CPU = torch.device("cpu")
WHOLE = Split(1, 0)
DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""What results may differ by, relatively, from those computed in float32: in bfloat16 the last bit, once."""


def tokens_in_pages(cache: PagedCache, *, loops: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of layer 1 as [slots, heads, D], from either way of laying out a page."""
    shape = cache.shape
    if not loops:
        return cache.keys[1], cache.values[1]
    pair = 1 if shape.dtype == torch.float32 else 2
    keys = cache.keys[1].view(-1, shape.heads, shape.head_size // pair, shape.page, pair).permute(0, 3, 1, 2, 4)
    values = cache.values[1].view(-1, shape.heads, shape.page, shape.head_size).transpose(1, 2)
    return keys.reshape(-1, shape.heads, shape.head_size), values.reshape(-1, shape.heads, shape.head_size)


def caches(shape: CacheShape, lanes: int, width: int) -> tuple[PagedCache, PagedCache, Tensor]:
    """The same random tokens in a cache of each form, the second in float32, and a table of shuffled pages."""
    table = (torch.randperm(lanes * width) + 1).view(lanes, width).int()
    made = PagedCache(shape, CPU), PagedCache(replace(shape, dtype=torch.float32), CPU)
    slots = torch.arange(shape.page, (1 + lanes * width) * shape.page)
    key, value = (
        torch.randn(shape.heads, len(slots), shape.head_size).transpose(0, 1).to(shape.dtype) for _ in range(2)
    )
    for cache, ops in zip(made, (CpuOps(shape.dtype), TorchOps()), strict=True):
        cache.allocate(1 + lanes * width)
        ops.store(key.to(cache.shape.dtype), value.to(cache.shape.dtype), 1, cache, slots)
    return *made, table


def attend_both(
    new: New, mine: PagedCache, theirs: PagedCache, lanes: Lanes, how: How, rotary: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by the loops, and by the reference in float32 on the same numbers."""
    dtype = mine.shape.dtype
    got = CpuOps(dtype).attend_rotated(
        New(*(x.to(dtype) for x in new)), 1, mine, lanes, how, rotary and (rotary[0].to(dtype), rotary[1].to(dtype))
    )
    query, key, value = (x.to(dtype).float() for x in new)
    if rotary:
        query, key = (x.to(dtype).float() for x in apply_rotary_pos_emb(query, key, *(x.to(dtype) for x in rotary)))
    return got, TorchOps().attend(New(query, key, value), 1, theirs, lanes, WHOLE, how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(
    ("heads", "group", "size", "page"),
    [(2, 1, 32, 16), (3, 3, 64, 16), (1, 2, 128, 16), (2, 2, 48, 16), (2, 6, 16, 64), (1, 1, 24, 4), (2, 1, 64, 8)],
)
def test_attention_over_pages(
    heads: int, group: int, size: int, page: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 16, 17, 64, 65, 130, 192])
    shape, width = CacheShape(2, heads, size, dtype, page), 192 // page
    mine, theirs, table = caches(shape, len(lengths), width)
    lanes = Lanes.new(len(lengths), width, 4, CPU)
    lanes.length.copy_(lengths)
    lanes.table.copy_(table)
    # As the model makes them: heads before tokens in memory, seen the other way round.
    query, key = (torch.randn(heads * g, len(lengths), size).transpose(0, 1) for g in (group, 1))
    new = New(3 * query, key, torch.randn(len(lengths), heads, size))
    got, expected = attend_both(new, mine, theirs, lanes, How(size**-0.5, window))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING[dtype], atol=1e-5)
    for ours, reference in zip(tokens_in_pages(mine, loops=True), tokens_in_pages(theirs, loops=False), strict=True):
        assert torch.equal(ours.float(), reference), "the newest key and value are in their place, and nothing moved"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotary_embedding_is_applied_on_the_way(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = CacheShape(2, 2, 32, dtype, 16)
    mine, theirs, table = caches(shape, 5, 2)
    lanes = Lanes.new(5, 2, 4, CPU)
    lanes.length.copy_(torch.tensor([1, 7, 16, 17, 31]))
    lanes.table.copy_(table)
    query, key, value = torch.randn(5, 4, 32), torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    cosine, sine = torch.randn(2, 5, 32)
    got, expected = attend_both(New(query, key, value), mine, theirs, lanes, How(32**-0.5, None), (cosine, sine))
    # The reference turns in float32 and rounds once; the loops round as the model's own code does, three times.
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING[dtype], atol=1e-5 if dtype == DTYPES[0] else 0.03)


@pytest.mark.parametrize("vocabulary", [29, 256, 8191, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawing(vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    """Also in bfloat16 log-probs and entropies are those of float32, for logits are only widened."""
    torch.manual_seed(0)
    logits = (torch.randn(9, vocabulary) * 3).to(dtype)
    logits[0, : vocabulary // 2] = -torch.inf  # tokens that are never drawn, whole blocks of them among these
    logits[1] = -1e4
    logits[1, 3] = 0.0  # certainty
    logits[4] = 0.0  # all alike: greedy takes the first
    logits[5] += 1e4
    logits[6, vocabulary // 2 :] = -torch.inf
    uniforms = torch.rand(9, 4, dtype=torch.float64)
    uniforms[2], uniforms[3], uniforms[6] = 0.0, 1 - 2**-53, 1 - 2**-53  # the ends of the interval
    results = []
    for ops in (CpuOps(dtype), TorchOps()):
        lanes = Lanes.new(9, 2, 4, CPU)
        lanes.uniforms.copy_(uniforms)
        lanes.step.fill_(2)
        lanes.position.copy_(torch.tensor([9] * 7 + [3, 4]))
        ops.draw(logits, lanes, Sampling(4, (), temperature=temperature), 9)
        results.append(lanes)
    mine, theirs = results
    for name in ("token", "tokens", "position", "length"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=2e-5)


def test_draws_follow_the_distribution_to_its_tails() -> None:
    """Uniform numbers on a fine grid: each token is drawn as often as its probability says, to one part of the grid."""
    torch.manual_seed(1)
    logits, n = torch.randn(600) * 2, 20_000
    lanes = Lanes.new(n, 1, 1, CPU)
    lanes.uniforms.copy_(((torch.arange(n, dtype=torch.float64) + 0.5) / n)[:, None])
    CpuOps().draw(logits.expand(n, -1), lanes, Sampling(1, ()), 9)
    counts = lanes.token.bincount(minlength=600)
    assert (counts - n * logits.double().softmax(0)).abs().max() <= 1.01


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_show_in_the_logprob(temperature: float) -> None:
    logits = torch.randn(2, 50)
    logits[1, 7] = torch.nan
    lanes = Lanes.new(2, 1, 1, CPU)
    CpuOps().draw(logits, lanes, Sampling(1, (), temperature=temperature), 9)
    assert lanes.logprobs.isnan().flatten().tolist() == [False, True]
    assert 0 <= int(lanes.token[1]) < 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalising_and_gating(dtype: torch.dtype) -> None:
    """Against the modules that the model's own code is made of, which round in the same places."""
    torch.manual_seed(2)
    ops, norm = CpuOps(dtype), LlamaRMSNorm(50, 1e-3).to(dtype)
    x, added = (torch.randn(2, 7, 50) * 5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        for other in (added, None):
            copy, base = x.clone(), x if other is None else x + other
            close = {"rtol": ROUNDING[dtype], "atol": 1e-6}
            torch.testing.assert_close(ops.normalise(copy, norm.weight, 1e-3, other), norm(base), **close)
            assert torch.equal(copy, base)
    gate = torch.cat([torch.linspace(-200, 200, 301), torch.tensor([torch.inf, torch.nan])])[None].to(dtype)
    up = torch.randn_like(gate)
    expected = torch.nn.functional.silu(gate) * up
    close = {"rtol": 2e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-30}
    torch.testing.assert_close(ops.gate_mlp(gate, up), expected, **close, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            ops, shape = CpuOps(dtype), CacheShape(2, 3, 32, dtype, 16)
            cache, _, table = caches(shape, 19, 3)
            lanes = Lanes.new(19, 3, 1, CPU)
            lanes.length.copy_(torch.arange(1, 39, 2))
            lanes.table.copy_(table)
            lanes.uniforms.uniform_()
            new = New(*(torch.randn(19, heads, 32).to(dtype) for heads in (6, 3, 3)))
            attended = ops.attend(new, 1, cache, lanes, WHOLE, How(1.0, None))
            normed = ops.normalise(attended.view(19, -1).clone(), torch.randn(192).to(dtype), 1e-5)
            ops.draw(normed, lanes, Sampling(1, ()), 99)
            gated = ops.gate_mlp(normed, torch.randn(19, 192).to(dtype))
            results.append([cache.keys[1], attended, gated, lanes.tokens, lanes.logprobs, lanes.entropies])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_step_is_written_out_for_models_that_are_known() -> None:
    assert [name for name in ("llama", "qwen2", "qwen3", "gemma3", "gpt2") if knows(build(name))] == [
        "llama", "qwen2", "qwen3",
    ]  # fmt: skip
    hooked, gelu, growing = build("llama"), build("llama"), build("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    gelu.config.hidden_act = "gelu"
    growing.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not any(map(knows, (hooked, gelu, growing)))


def test_adapters_are_computed_by_the_model_s_own_code() -> None:
    from peft import LoraConfig, get_peft_model

    model = build("qwen2").eval()
    with quiet():
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    assert not knows(model)
    expected = answers(TransformersEngine(model, max_rows=6), requests_of(), Sampling(20, (0, 1)))
    for key, response in answers(NativeEngine(model, max_rows=6), requests_of(), Sampling(20, (0, 1))).items():
        assert response.tokens.tolist() == expected[key].tokens.tolist()
        assert response.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


def test_a_diverged_policy_is_named() -> None:
    model = build("llama")
    engine = NativeEngine(model, max_rows=8)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="checkpoint"):
        answers(engine, requests_of(), Sampling(24, ()))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for compiled loops, and none loaded yet."""
    monkeypatch.setenv("R3_CACHE", str(tmp_path / "cache"))
    cpu.library.cache_clear()
    yield tmp_path / "cache"
    cpu.library.cache_clear()


def test_the_loops_are_compiled_once_and_kept(own_cache: Path) -> None:
    CpuOps()
    (made,) = own_cache.iterdir()
    before = made.stat().st_mtime_ns, made.stat().st_ino
    cpu.library.cache_clear()
    CpuOps()
    assert [path.name for path in own_cache.iterdir()] == [made.name]
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == before


def test_each_type_of_tensor_has_a_library_of_its_own(own_cache: Path) -> None:
    x = torch.linspace(-3, 3, 64)[None]
    for _ in range(2):  # compiled, and then found
        for dtype in DTYPES:
            got = CpuOps(dtype).gate_mlp(x.to(dtype, copy=True), x.to(dtype))
            torch.testing.assert_close(got.float(), torch.nn.functional.silu(x) * x, rtol=0.02, atol=1e-6)
        cpu.library.cache_clear()
    assert len(list(own_cache.iterdir())) == 2


def test_a_processor_without_products_in_bfloat16_attends_alike(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-mno-avx512bf16"))
    test_attention_over_pages(3, 3, 64, 16, None, torch.bfloat16)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(Unavailable, match="take float32 and bfloat16, not float16"):
        NativeEngine(build("llama").half())


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("script", "reason"),
    [(None, "there is no C compiler"), ("echo 'no space' >&2; exit 1", r"cannot compile its loops \(no space\)")],
)
def test_auto_goes_on_without_a_compiler_and_says_so_once(
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str | None,
    reason: str,
) -> None:
    if script:
        executable(tmp_path / "bin" / "gcc", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(Unavailable, match=reason):
        cpu.library()
    policy = Policy.load(ModelSettings(device="cpu"))
    with caplog.at_level(logging.WARNING):
        assert type(make_engine(Config(), policy)) is TransformersEngine
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rollout.engine=auto" in caplog.text
    assert "more slowly" in caplog.text


def test_a_cache_that_is_a_file_names_the_way_out(own_cache: Path) -> None:
    own_cache.write_text("")
    with pytest.raises(Unavailable, match="set R3_CACHE to a folder"):
        cpu.library()


def test_auto_takes_the_loops_where_they_are(tmp_path: Path) -> None:
    assert type(make_engine(Config(), Policy.load(ModelSettings(device="cpu")))) is NativeEngine
    lora = Policy.load(ModelSettings(device="cpu", lora=LoraSettings(enabled=True)))
    assert type(make_engine(Config(), lora)) is NativeEngine
