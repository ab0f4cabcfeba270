"""Linear layers through oneDNN against torch's own, forward and backward, in float64 as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from r3.policy import layers
from r3.policy.layers import available, onednn
from tests.rollout.models import build

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no oneDNN linear layer for this CPU")


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST", 0)


def gradients(layer: nn.Linear, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Of a weighted sum of what the layer gives: its output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    layer.zero_grad()
    (out * weights).sum().backward()
    return [grad for grad in (out.detach(), x.grad, *(p.grad for p in layer.parameters())) if grad is not None]


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


@pytest.mark.usefixtures("every_size")
def test_frozen_weights_get_no_gradient_and_inputs_still_do() -> None:
    layer, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    with onednn(layer):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


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
