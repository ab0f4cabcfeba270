"""On a card: the native engine against the trainer's forward, against transformers and against statistics; training
with variable-length flash attention, shared prompts, compiled layers, float32 gradients, and inside TRL; the real vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from r3.config import TrainSettings
from r3.policy import ModelSettings
from r3.policy.attention import flash, layout_of, padded
from r3.policy.model import Policy, enable_checkpointing
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory
from r3.rollout import Request, Sampling
from r3.rollout.native import NativeEngine
from r3.rollout.transformers import TransformersEngine
from r3.rollout.vllm.engine import VllmEngine
from tests.rollout.models import ARCHITECTURES, answers, build, requests_of, teacher_forced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.filterwarnings("default"),  # torch's compiler and TRL warn of their own parts
]
STOP = (0, 1, 2, 3)
MEDIUM = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def medium(kind: str = "qwen2", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Wide and deep enough for bfloat16 to show; not so wild that rounding grows from layer to layer."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**MEDIUM)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**MEDIUM))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.025)
    return model.to("cuda", dtype).eval()


def ragged(n: int = 4) -> list[Request]:
    rng = np.random.default_rng(3)
    lengths = (1, 63, 64, 65, 130, 300, 700)
    return [Request(rng.integers(4, 4096, size).astype(np.int32), n, seed=size) for size in lengths]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float32_equals_the_portable_engine(architecture: str, temperature: float) -> None:
    model, sampling = build(architecture).cuda(), Sampling(24, STOP, temperature=temperature)
    expected = answers(TransformersEngine(model, max_rows=6), requests_of(), sampling)
    for key, response in answers(NativeEngine(model, max_rows=8, steps=5), requests_of(), sampling).items():
        assert response.tokens.tolist() == expected[key].tokens.tolist()
        assert response.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert response.entropies == pytest.approx(expected[key].entropies, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_greedy_in_float32_is_transformers_own(kind: str, compiled: bool) -> None:
    model = medium(kind)
    engine = NativeEngine(model, max_rows=16, compile=compiled)
    got = answers(engine, ragged(n=1), Sampling(200, (0,), temperature=0.0))
    for place, request in enumerate(ragged(n=1)):
        prompt = torch.from_numpy(request.prompt.astype(np.int64))[None].cuda()
        options = {"do_sample": False, "max_new_tokens": 200, "eos_token_id": 0, "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :]
        assert got[place, 0].tokens.tolist() == expected.tolist()
        logits = teacher_forced(model.cpu(), request.prompt, got[place, 0].tokens)
        model.cuda()
        logs = torch.from_numpy(logits).log_softmax(-1)
        drawn = logs.gather(1, torch.from_numpy(got[place, 0].tokens).long()[:, None])[:, 0].numpy()
        assert np.abs(got[place, 0].logprobs - drawn).max() < 1e-4


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_bfloat16_agrees_with_the_trainers_forward(compiled: bool) -> None:
    model = medium(dtype=torch.bfloat16)
    responses = answers(NativeEngine(model, max_rows=64, compile=compiled), ragged(), Sampling(500, (0,)))
    policy = Policy(model, None, ModelSettings(compile=False), base=model)
    gaps: dict[str, list[np.ndarray]] = {"logprobs": [], "entropies": []}
    for (place, _), response in responses.items():
        with torch.no_grad():
            own = policy.statistics([Trajectory(ragged()[place].prompt, response.tokens)], temperature=1.0)
        gaps["logprobs"].append(np.abs(own.logprobs_T.cpu().numpy() - response.logprobs))
        gaps["entropies"].append(np.abs(own.entropies_T.cpu().numpy() - response.entropies))
    for name, parts in gaps.items():
        gap = np.concatenate(parts)
        print(f"\n{name}: {len(gap)} tokens, mean {gap.mean():.5f}, p99.9 {np.quantile(gap, 0.999):.4f} nats", end="")
        assert gap.mean() <= 0.01, name


def test_sampled_frequencies_are_the_models_probabilities() -> None:
    model, n = build("qwen2").cuda(), 8000
    request = Request(np.array([5, 9, 4], np.int32), n, seed=11)
    responses = answers(NativeEngine(model, max_rows=512, steps=1), [request], Sampling(1, ()))
    counts = Counter(int(response.tokens[0]) for response in responses.values())
    with torch.no_grad():
        ids = torch.from_numpy(request.prompt.astype(np.int64))[None].cuda()
        expected = n * model.eval()(ids).logits[0, -1].double().softmax(-1).cpu().numpy()
    common = expected >= 5
    observed = np.array([counts.get(token, 0) for token in range(len(expected))], float)
    cells = [*zip(observed[common], expected[common], strict=True), (observed[~common].sum(), expected[~common].sum())]
    chi_square = sum((o - e) ** 2 / e for o, e in cells if e > 0)
    degrees = sum(e > 0 for _, e in cells) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees), f"{chi_square:.1f} with {degrees} degrees of freedom"


def test_a_group_is_the_same_whatever_is_beside_it() -> None:
    model, sampling = medium(), Sampling(120, (0,), temperature=0.0)
    requests = ragged(n=2)
    alone = {}
    for place, request in enumerate(requests):
        for (_, index), response in answers(NativeEngine(model, max_rows=2), [request], sampling).items():
            alone[place, index] = response
    for rows, steps in ((3, 7), (14, 16), (64, 32)):
        for key, response in answers(NativeEngine(model, max_rows=rows, steps=steps), requests, sampling).items():
            assert response.tokens.tolist() == alone[key].tokens.tolist(), (rows, key)


def test_released_memory_is_free_and_graphs_outlive_it() -> None:
    model = medium(dtype=torch.bfloat16)
    engine = NativeEngine(model, max_rows=32)
    expected = answers(engine, ragged(), Sampling(40, (0,)))
    held = torch.cuda.memory_allocated()
    graphs = dict(engine._decoder._graphs)
    assert graphs
    engine.release()
    assert torch.cuda.memory_allocated() < held
    elsewhere = torch.empty(2**28, device="cuda")  # so that the cache comes to lie at other addresses
    again = answers(engine, ragged(), Sampling(40, (0,)))
    assert engine._decoder._graphs == graphs, "captured once, replayed over the new cache"
    assert {key: r.tokens.tolist() for key, r in again.items()} == {k: r.tokens.tolist() for k, r in expected.items()}
    del elsewhere


def test_graphs_read_the_weights_as_they_are_now() -> None:
    model = medium()
    engine, sampling = NativeEngine(model, max_rows=32), Sampling(30, (0,), temperature=0.0)
    before = answers(engine, ragged(1), sampling)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    changed = answers(TransformersEngine(model, max_rows=32), ragged(1), sampling)
    got = answers(engine, ragged(1), sampling)
    assert {k: r.tokens.tolist() for k, r in got.items()} == {k: r.tokens.tolist() for k, r in changed.items()}
    assert any(before[key].tokens.tolist() != got[key].tokens.tolist() for key in got)


def test_a_full_cache_sets_rows_back_and_changes_nothing() -> None:
    model, sampling = medium(), Sampling(400, (0,), temperature=0.0)
    expected = answers(NativeEngine(model, max_rows=28), ragged(), sampling)
    engine = NativeEngine(model, max_rows=28, max_pages=60)
    got = answers(engine, ragged(), sampling)
    assert engine.preempted > 0
    assert {k: r.tokens.tolist() for k, r in got.items()} == {k: r.tokens.tolist() for k, r in expected.items()}


# Training.


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


# The real vLLM behind the protocol.


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, Policy]]:
    """One engine for all tests, started from other weights than the policy has by then."""
    pytest.importorskip("vllm", reason="vLLM is not installed (r3-rl[vllm])")
    folder: Path = tmp_path_factory.mktemp("model")
    model = medium("llama", torch.bfloat16)
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    engine = VllmEngine(model, str(folder), max_rows=32, memory=0.3)
    yield engine, Policy(model, None, ModelSettings(compile=False), base=model)
    engine.release()


def gap(policy: Policy, responses: dict) -> float:
    """Mean absolute difference between the engine's log-probs and the trainer's."""
    gaps = []
    for (place, _), response in responses.items():
        with torch.no_grad():
            own = policy.statistics([Trajectory(ragged()[place].prompt, response.tokens)], temperature=1.0)
        gaps.append(np.abs(own.logprobs_T.cpu().numpy() - response.logprobs))
    return float(np.concatenate(gaps).mean())


def test_it_draws_from_the_policys_weights_as_they_are_now(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running
    responses = answers(engine, ragged(), Sampling(100, (0,)))
    assert all(response.entropies is None for response in responses.values())
    assert gap(policy, responses) < 0.05
    again = answers(engine, ragged(), Sampling(100, (0,)))
    assert {k: r.tokens.tolist() for k, r in again.items()} == {k: r.tokens.tolist() for k, r in responses.items()}
    with torch.no_grad():
        for parameter in policy.base.parameters():
            parameter.mul_(1.05)
    changed = answers(engine, ragged(), Sampling(100, (0,)))
    assert gap(policy, changed) < 0.05
    assert gap(policy, responses) > 0.05, "the old responses no longer fit"


def test_stop_tokens_and_limits(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    stops = tuple(range(0, 4096, 50))
    responses = answers(engine, ragged(), Sampling(60, stops))
    for response in responses.values():
        stopped = response.tokens[-1] in stops
        assert response.finish == ("stop" if stopped else "length")
        assert stopped or len(response.tokens) == 60
        assert not set(response.tokens[:-1].tolist()) & set(stops)
    assert {response.finish for response in responses.values()} == {"stop", "length"}


def test_asleep_it_gives_memory_back_and_a_call_left_unfinished_ends(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    left = engine.generate(ragged(), Sampling(200, ()))
    next(left)
    awake = torch.cuda.mem_get_info()[0]
    engine.release()
    assert torch.cuda.mem_get_info()[0] > awake + 2**30
    assert list(left) == []
    assert len(answers(engine, ragged(1), Sampling(5, ()))) == len(ragged())
