"""Training does not care which engine drew the samples, as long as it says what it measured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from r3.cli import main
from r3.config import Config, TrainSettings
from r3.errors import ConfigError
from r3.method.mixed import WeightedSample
from r3.method.objective import TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from r3.policy.layers import CompiledLayers
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.settings import ModelSettings
from r3.policy.update import Updater
from r3.rollout import Request, Response, Sampling
from r3.rollout.native import NativeEngine
from r3.rollout.native.ops import TorchOps
from r3.rollout.settings import RolloutSettings
from r3.rollout.transformers import TransformersEngine
from r3.samples import Sample
from r3.train import build as building
from r3.train.build import make_engine
from tests.tokenizing import char_tokenizer
from tests.train.tiny import overrides, read_metrics, save_model


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    return read_metrics(folder / "run")


def test_a_run_on_the_native_engine_is_the_run_on_the_portable_one(tmp_path: Path) -> None:
    """In float32 both draw the same tokens: outcomes, replays and rewards are the same, step by step."""
    portable = train(tmp_path / "portable", rollout__engine="transformers")
    native = train(tmp_path / "native", rollout__engine="native")
    assert len(native) == len(portable)
    assert sum(line.get("replay/samples") or 0 for line in native) > 0
    for ours, theirs in zip(native, portable, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            expected = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            assert ours[key] == expected, key


def policy_of(folder: Path) -> Policy:
    return Policy.load(ModelSettings(path=str(save_model(folder)), device="cpu"))


class Approximate:
    """A real engine that measures as vLLM does: log-probs a little off, no entropies."""

    exact = False

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        for response in self.engine.generate(requests, sampling):
            noise = np.random.default_rng(len(response.tokens)).normal(0, 0.05, len(response.tokens))
            yield replace(response, entropies=None, logprobs=(response.logprobs + noise).astype(np.float32))

    def release(self) -> None:
        self.engine.release()


def test_an_engine_without_entropies_still_gets_its_answers_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = train(tmp_path / "exact", train__epochs=1)
    make = building.make_engine
    monkeypatch.setattr(building, "make_engine", lambda *arguments: Approximate(make(*arguments)))
    bare = train(tmp_path / "bare", train__epochs=1)
    # The policy of the first step is the same, and so are its tokens: the ranking must be too.
    assert exact[1]["ranking/samples"] == bare[1]["ranking/samples"] > 0
    assert bare[1]["reward"] == pytest.approx(exact[1]["reward"])


@pytest.mark.parametrize("updates", [1, 2])
def test_log_probs_of_another_kernel_are_corrected_not_clipped(tmp_path: Path, updates: int) -> None:
    """With exact=False a sample's ratio starts at 1 and what is off goes into a capped weight, as for stale samples."""
    policy = policy_of(tmp_path / "model")
    rng = np.random.default_rng(0)
    batch = []
    for i in range(4):
        tokens = rng.integers(5, 90, 9).astype(np.int32)
        behaviour = np.full(9, -4.0, np.float32)  # far from the model's own: naive ratios would all be clipped
        sample = Sample(f"q{i}", tokens, behaviour, None, finish="stop", outcome=bool(i % 2), reward=float(i % 2))
        batch.append(WeightedSample(np.array([7, 8], np.int32), sample, (-1.0) ** i, 1 / 36, "fresh", False, 0, i))
    settings = TrainSettings(updates_per_batch=updates, learning_rate=1e-9)
    shares = {}
    for exact in (True, False):
        optimiser = Optimiser(policy.model.parameters(), settings, 10)
        updater = Updater(policy, optimiser, ObjectiveSettings(), settings, 1.0, exact=exact)
        shares[exact] = updater.update(batch, version=0, seed=(0, 0)).diagnostics["clip_share/fresh"]
    assert shares[True] > 0.2
    assert shares[False] == 0


def test_the_correction_is_a_truncated_importance_weight() -> None:
    current = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    behaviour = torch.tensor([-1.2, -1.0, -5.0])
    batch = TokenBatch(
        sequence_T=torch.zeros(3, dtype=torch.long),
        behaviour_T=behaviour,
        advantage_T=torch.full((3,), 2.0),
        weight_S=torch.tensor([1.0]),
        origin_S=torch.tensor([0]),
        other_context_S=torch.tensor([False]),
        proximal_T=current.detach(),
    )
    settings = ObjectiveSettings(importance_cap=2.0)
    policy_loss(current, batch, settings).loss.backward()
    expected = -2.0 * (current.detach() - behaviour).exp().clamp(max=2.0)
    torch.testing.assert_close(current.grad, expected)


def test_auto_falls_back_from_a_model_the_native_engine_does_not_know(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()
    policy = Policy(model, char_tokenizer(), ModelSettings(), base=model)
    with pytest.raises(ConfigError, match=r"rollout.engine=native: Gemma2ForCausalLM soft-caps .*engine=transformers"):
        make_engine(Config(rollout=RolloutSettings(engine="native")), policy)
    assert type(make_engine(Config(), policy)) is TransformersEngine
    with caplog.at_level(logging.WARNING):  # what auto does on a card, minus the card
        assert building._native(Config(), policy) is None
    assert "Gemma2ForCausalLM soft-caps its attention" in caplog.text


def test_vllm_where_it_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine=vllm: vLLM is not installed; pip install 'r3-rl\[vllm\]'"):
        make_engine(Config(rollout=RolloutSettings(engine="vllm")), policy_of(tmp_path / "model"))


def test_gradients_of_bfloat16_parameters_add_up_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimiser = Optimiser([parameter], TrainSettings(learning_rate=0.5, max_grad_norm=1e9), 1)
    for _ in range(300):  # in bfloat16 the sum would stick at 256
        parameter.sum().backward()
    assert parameter.grad is None
    assert optimiser.masters[0].grad is not None
    assert optimiser.masters[0].grad.tolist() == [300.0] * 3
    assert optimiser.step(0) is not None
    assert parameter.tolist() == [-0.5] * 3


def test_layers_are_compiled_once_for_all_of_them_and_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine's decoding, with a backend that only counts: a compilation a layer or a length would show."""
    from tests.rollout.models import answers, build, requests_of

    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr("torch.compile", lambda call, **options: compile_(call, backend=count, **options))
    model = build("qwen2").eval()
    plain = answers(NativeEngine(model, max_rows=8, steps=5, ops=TorchOps()), requests_of(), Sampling(12, (0, 1)))
    engine = NativeEngine(model, max_rows=8, steps=5, compile=True, ops=TorchOps())
    got = answers(engine, requests_of(), Sampling(12, (0, 1)))
    assert {k: r.tokens.tolist() for k, r in got.items()} == {k: r.tokens.tolist() for k, r in plain.items()}
    first = len(graphs)
    assert 0 < first < 4 * len(CompiledLayers(model, "test")._layers)
    answers(engine, requests_of((5, 9, 4, 6, 7, 13), n=1), Sampling(20, (0, 1)))
    assert len(graphs) == first
    assert all(layer._compiled_call_impl is None for layer in model.model.layers), "only while the engine runs"
