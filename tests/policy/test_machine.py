"""The machine under the policy: what a container leaves of memory and processors, and matrix products on a CPU.

Covers r3.policy.layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from r3.policy import layers, machine
from r3.policy.layers import available, onednn
from r3.policy.machine import allowed_processors, free_memory, set_threads
from tests.rollout.models import build


def control_group(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 3 * 2**20),
        ({"memory.max": "max", "memory.current": "5"}, 3 * 2**20),
        ({"memory.max": "2097152", "memory.current": "1048576"}, 2**20),
        ({"memory.max": "5", "memory.current": "7"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "9"}, 3 * 2**20),
        ({"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "40"}, 60),
    ],
)
def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path, files: dict[str, str], free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9999 kB\nMemAvailable:   3072 kB\n")
    control_group(tmp_path, files)
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "400000"}, None),
    ],
)
def test_processors_are_those_of_the_quota(tmp_path: Path, files: dict[str, str], processors: int | None) -> None:
    control_group(tmp_path, files)
    assert allowed_processors(tmp_path) == processors


@pytest.mark.parametrize(
    ("wanted", "cores", "quota", "set_to"),
    [(None, 64, None, []), (None, 64, 2, [2]), (None, 2, 64, []), (5, 64, 2, [5])],
)
def test_threads_are_as_many_as_may_run(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, cores: int, quota: int | None, set_to: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(machine, "allowed_processors", lambda: quota)
    set_threads(wanted)
    assert chosen == set_to


HAS_ONEDNN = pytest.mark.skipif(not available(), reason="this torch has no oneDNN linear layer for this CPU")


# Linear layers through oneDNN against torch's own, forward and backward, in float64 as well.


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST", 0)


def gradients(layer: nn.Linear, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The layer's output, and the gradients of input and parameters from a weighted sum of it."""
    x = x.clone().requires_grad_()
    out = layer(x)
    layer.zero_grad()
    (out * weights).sum().backward()
    return [grad for grad in (out.detach(), x.grad, *(p.grad for p in layer.parameters())) if grad is not None]


@HAS_ONEDNN
@pytest.mark.usefixtures("every_size")
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_a_layer_gives_what_it_gave_and_so_do_its_gradients(
    shape: list[int], features: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(features, outputs, bias=bias)
    x, weights = torch.randn(*shape, features), torch.randn(*shape, outputs)
    with onednn(layer):
        assert "forward" in vars(layer)
        fast = gradients(layer, x, weights)
    exact = gradients(copy.deepcopy(layer).double(), x.double(), weights.double())
    assert len(fast) == len(exact) == 3 + bias
    for got, expected in zip(fast, exact, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got.double(), expected, atol=1e-4, rtol=1e-4)


@HAS_ONEDNN
@pytest.mark.usefixtures("every_size")
def test_frozen_weights_get_no_gradient_and_inputs_still_do() -> None:
    layer, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    with onednn(layer):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


@HAS_ONEDNN
@pytest.mark.usefixtures("every_size")
def test_blocks_nest_and_leave_the_model_as_it_was() -> None:
    model = build("llama")
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with onednn(model):
        with onednn(model):
            assert all("forward" in vars(layer) for layer in modules)
        assert all("forward" in vars(layer) for layer in modules)
    assert not any("forward" in vars(layer) for layer in modules)

    def fail() -> None:
        with onednn(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any("forward" in vars(layer) for layer in modules)


@HAS_ONEDNN
def test_other_types_and_small_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, ...]] = []
    product = layers._product

    def watched(x: Tensor, *rest: Any) -> Tensor:
        used.append(tuple(x.shape))
        return product(x, *rest)

    monkeypatch.setattr(layers, "_product", watched)
    big, half = nn.Linear(512, 512), nn.Linear(512, 512).bfloat16()
    with torch.no_grad(), onednn(nn.ModuleList([big, half])):
        small = torch.randn(1, 512)
        assert torch.equal(big(small), F.linear(small, big.weight, big.bias))
        assert half(torch.randn(8, 512).bfloat16()).dtype == torch.bfloat16
        assert not used
        big(torch.randn(8, 512))
        assert used == [(8, 512)]


@HAS_ONEDNN
@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_a_whole_model_s_gradients_are_the_same(architecture: str) -> None:
    """Tied weights, biases and several uses of a parameter included."""
    model = build(architecture).eval()
    ids = torch.arange(2, 22)[None]

    def loss_gradients() -> list[Tensor]:
        loss = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    own = loss_gradients()
    with onednn(model):
        fast = loss_gradients()
    for got, expected in zip(fast, own, strict=True):
        assert torch.allclose(got, expected, atol=1e-3, rtol=1e-3)
