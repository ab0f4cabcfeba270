"""Training does not care which engine drew the samples, nor whether it drew them while the last update ran.

Covers r3.train.sampler.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from r3.cli import main
from r3.config import Config, TrainSettings
from r3.errors import DIVERGED, ConfigError
from r3.method.mixed import WeightedSample
from r3.method.objective import TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from r3.policy import ModelSettings
from r3.policy.layers import CompiledLayers
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.update import Updater
from r3.rollout import Request, Response, RolloutSettings, Sampling
from r3.rollout.native import NativeEngine
from r3.rollout.native.ops import TorchOps
from r3.rollout.transformers import TransformersEngine
from r3.run import RunFiles
from r3.samples import Sample
from r3.train import build as building
from r3.train.build import make_engine
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.test_resume import MOMENTS
from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics, save_model


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("r3-ahead")]
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


# `rollout.ahead=1`: a step's answers are drawn while the last update runs, and the run is as exact as any other.


# 8 steps; every mechanism, with queries asked in the place of groups without variance and some before their turn.
SETTINGS = {
    "rollout__ahead": 1,
    "train__epochs": 5,
    "run__checkpoint_every": 3,
    "method__resample__enabled": "true",
    "method__revisit__enabled": "true",
}
CAP = 2.0


def logprobs_of(weights: Path, row: dict[str, Any]) -> np.ndarray:
    """The log-probs of a row's response, by a plain forward of the model in that folder."""
    model = AutoModelForCausalLM.from_pretrained(weights)
    prompt = char_tokenizer().encode(row["prompt"], add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *row["tokens"]]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(row["tokens"])), row["tokens"]].numpy()


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    """What was drawn for the step; only the first row of a group tells its prompt."""
    prompts: dict[int, str] = {}
    rows = []
    for row in RunFiles(run).rollouts.read(step):
        row["prompt"] = prompts.setdefault(row["group"], row.get("prompt", ""))
        rows.append(row)
    return rows


def test_answers_are_one_update_old_and_weighed_for_it(tmp_path: Path) -> None:
    lines = train(
        tmp_path,
        rollout__ahead=1,
        method="grpo",
        train__learning_rate="3e-3",
        run__checkpoint_every=1,
        run__keep_checkpoints=9,
    )
    run = tmp_path / "run"
    weights = [tmp_path / "model", *sorted((run / "checkpoints").glob("step-*/policy"))]
    for step in (2, 3, 6):
        rows, loss = rows_of(run, step), 0.0
        for row in rows:
            before, now = (logprobs_of(folder, row) for folder in (weights[step - 2], weights[step - 1]))
            assert row["policy_version"] == lines[step - 2].get("policy_version", 0)
            np.testing.assert_allclose(row["logprobs"], before, atol=1e-4)
            assert np.abs(now - before).max() > 1e-2
            assert isinstance(row["ratios"], list) == (row["advantage"] != 0)
            if row["advantage"] != 0:
                np.testing.assert_allclose(row["ratios"], np.exp(now - before), rtol=1e-3, atol=1e-3)
            loss -= row["advantage"] * np.exp(now - before).clip(max=CAP).mean() / len(rows)
        assert loss != pytest.approx(0, abs=1e-3)
        assert lines[step]["update/loss"] == pytest.approx(loss, abs=1e-4)


def test_prompts_and_evaluations_are_those_of_a_run_that_takes_turns(tmp_path: Path) -> None:
    """Until the answers differ, which is from the second step on: that step's prompts and the first's evaluation."""
    more = {"method__revisit__enabled": "true", "evaluate__every": 1, "evaluate__samples": 8, "train__epochs": 4}
    ahead, turns = train(tmp_path / "ahead", rollout__ahead=1, **more), train(tmp_path / "turns", **more)
    assert len(ahead) == len(turns) == 9
    assert ahead[2] != turns[2]
    for key in [key for key in ahead[1] if key.startswith("heldout/")]:
        assert ahead[1][key] == turns[1][key]
    assert ahead[0]["heldout/tokens"] != ahead[1]["heldout/tokens"], "an evaluation can tell the weights apart"
    asked = [[row["prompt"] for row in rows_of(tmp_path / name / "run", 2)] for name in ("ahead", "turns")]
    assert asked[0] == asked[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    lines = train(folder, **SETTINGS)
    for name in ("replay/samples", "groups/reflection", "ranking/samples", "revisit/asked"):
        assert sum(line.get(name) or 0 for line in lines) > 0, name
    assert max(line.get("groups/plain", 0) for line in lines) > 4, "others were asked in the place of some"
    return folder


def same(folder: Path, other: Path) -> None:
    assert read_metrics(folder / "run") == read_metrics(other / "run")
    assert contents(folder) == contents(other)
    last = sorted((other / "run").glob("checkpoints/step-*"))[-1].name
    found, expected = (f / "run" / "checkpoints" / last / "policy" / "model.safetensors" for f in (folder, other))
    assert found.read_bytes() == expected.read_bytes()


def given(folder: Path, uninterrupted: Path) -> list[str]:
    shared = {"model__path": uninterrupted / "model", "task__path": uninterrupted / "task.jsonl"}
    return overrides(folder, **SETTINGS, **shared)


@pytest.mark.parametrize("moment", ["after the checkpoint, in the middle of a step", "after rollouts, before metrics"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, uninterrupted: Path, moment: str) -> None:
    process = subprocess.Popen(
        command("train", "--quiet", *given(tmp_path, uninterrupted)), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not MOMENTS[moment](tmp_path / "run"):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run")]) == 0
    same(tmp_path, uninterrupted)


def test_a_signal_waits_for_the_answers_under_way_and_keeps_them(tmp_path: Path, uninterrupted: Path) -> None:
    process = subprocess.Popen(
        command("train", "--quiet", *given(tmp_path, uninterrupted)), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    process.communicate()
    assert process.returncode == 143
    checkpoint = RunFiles(tmp_path / "run").checkpoints.latest()
    assert checkpoint is not None
    kept = torch.load(checkpoint.path / "trainer.pt", weights_only=True)["ahead"]["answers"]
    assert len(kept) >= 4
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run")]) == 0
    same(tmp_path, uninterrupted)


def test_nothing_is_drawn_for_a_step_that_does_not_come(tmp_path: Path) -> None:
    lines = train(tmp_path, rollout__ahead=1, train__tokens=300, run__checkpoint_every=1, run__keep_checkpoints=9)
    assert lines[-1]["tokens/total"] >= 300 > lines[-2]["tokens/total"]
    kept = [torch.load(path)["ahead"] for path in sorted((tmp_path / "run").glob("checkpoints/*/trainer.pt"))]
    assert len(kept) == len(lines) - 1
    assert [found is None for found in kept] == [False] * (len(kept) - 1) + [True]


def test_answers_to_data_that_changed_are_drawn_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, rollout__ahead=1, run__checkpoint_every=1, train__epochs=4)
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if checkpoint.name == "step-000008":
            for path in sorted(checkpoint.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            checkpoint.rmdir()
    task = tmp_path / "task.jsonl"
    task.write_text(task.read_text().replace("What is", "How much is"))
    resume = ["train", "--quiet", "--resume", str(tmp_path / "run")]
    assert main(resume) == 1
    assert main([*resume, "--allow-changed-data"]) == 0
    assert "the checkpoint's answers are to other prompts: drawn anew" in caplog.text
    assert len(read_metrics(tmp_path / "run")) == 9


def test_a_run_that_diverges_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answers are then under way, from weights that are no good either."""
    arguments = overrides(tmp_path, rollout__ahead=1, train__learning_rate="1e15", train__max_bad_updates=1)
    assert main(["train", "--quiet", *arguments]) == DIVERGED
    assert "a resume may lower train.learning_rate" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("r3-ahead")]


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        ("native", [], "rollout.engine=native generates where the update runs"),
        ("vllm", [], "rollout.engine=vllm shares this process's memory with the update"),
        ("transformers", ["--processes", "2"], "the 2 processes of a job generate and train in turns"),
    ],
)
def test_engines_that_take_turns_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, options: list[str], reason: str
) -> None:
    arguments = overrides(tmp_path, rollout__ahead=1, rollout__engine=engine)
    for how in [["--dry-run", *options], *([] if options else [[]])]:
        told = refused(capsys, "train", *how, *arguments)
        assert f"rollout.ahead=1: {reason}" in told
        assert "set rollout.engine=vllm-server" in told
    assert not (tmp_path / "run").exists()
