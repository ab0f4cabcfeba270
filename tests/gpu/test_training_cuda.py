"""Training on a card: variable-length flash attention, shared prompts, compiled layers, float32 gradients, TRL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from r3.config import TrainSettings
from r3.policy.attention import flash, layout_of, padded
from r3.policy.model import Policy, enable_checkpointing
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory
from r3.policy.settings import ModelSettings

from .test_native_cuda import medium

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.filterwarnings("default"),  # torch's compiler and TRL warn of their own parts
]


def sequences() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4096, size).astype(np.int32) for size in (7, 90, 256)]
    sizes = (1, 40, 333, 64, 5, 200, 128, 700)
    return [Trajectory(prompts[i % 3], rng.integers(0, 4096, size).astype(np.int32)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("window", [None, 17])
def test_flash_and_padded_are_the_same_function(window: int | None) -> None:
    torch.manual_seed(0)
    layout = layout_of([30, 5, 64, 1, 130], "cuda", prefixes=[None, 0, 0, None, 3])
    tokens, keys = 230, len(layout.key_K)
    grads = []
    inputs = [torch.randn(n, heads, 64, device="cuda") for n, heads in ((tokens, 8), (keys, 2), (keys, 2))]
    weight = torch.randn(tokens, 8, 64, device="cuda")
    for form, dtype in ((flash, torch.bfloat16), (padded, torch.float32)):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        out = form(*own, layout, 0.125, 0.0, window)
        (out.float() * weight).sum().backward()
        grads.append([out.detach().float(), *(x.grad.float() for x in own)])
    for fast, slow in zip(*grads, strict=True):
        assert (fast - slow).norm() / slow.norm() < 0.01


def gradients(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from r3.policy.attention import packed

    policy.base.train()
    with packed(policy.base), policy.compiled():
        statistics = policy.statistics(sequences(), temperature=0.9)
        weight = torch.linspace(-1, 1, len(statistics.logprobs_T), device="cuda")
        (statistics.logprobs_T * weight).mean().backward()
    found = {n: p.grad.float().clone() for n, p in policy.base.named_parameters() if p.grad is not None}
    policy.base.zero_grad()
    return statistics.logprobs_T.detach(), found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("sharing", [False, True], ids=["", "prompts shared"])
def test_fast_gradients_are_float32_gradients(sharing: bool, compiled: bool, checkpointing: bool) -> None:
    exact = medium(dtype=torch.float32)
    slow = Policy(exact, None, ModelSettings(compile=False), base=exact)
    model = medium(dtype=torch.bfloat16)
    if checkpointing:
        enable_checkpointing(model)
    fast = Policy(model, None, ModelSettings(compile=compiled), base=model)
    fast.shares_prompts = sharing
    expected, wanted = gradients(slow)
    logprobs, got = gradients(fast)
    assert (logprobs - expected).abs().mean() < 0.03
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert (gradient - wanted[name]).norm() / wanted[name].norm() < 0.1, name


def test_gradients_add_up_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, device="cuda", dtype=torch.bfloat16))
    optimiser = Optimiser([parameter], TrainSettings(learning_rate=1.0), 1)
    for _ in range(300):  # in bfloat16 the sum would stick at 256
        parameter.sum().backward()
    assert parameter.grad is None
    assert optimiser.masters[0].grad.tolist() == [300.0] * 4


def test_r3_trainer_trains_on_a_card(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
    from tests.integrations.trl_tiny import logged, losses, make

    trainer = make(tmp_path, use_cpu=False, bf16=True)
    trainer.train()
    assert next(trainer.model.parameters()).is_cuda
    assert len(losses(trainer)) == 6
    assert torch.isfinite(torch.tensor(losses(trainer))).all()
    for name in ("r3/replay/samples", "r3/groups/reflection", "r3/ranking/samples"):
        assert sum(logged(trainer, name)) > 0, name
