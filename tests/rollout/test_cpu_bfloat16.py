"""The native engine in bfloat16 on a CPU: against the trainer's forward, transformers' `generate`, and itself resumed.

Covers r3.rollout.native.engine, r3.rollout.native.cpu, r3.policy.layers.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3.policy import ModelSettings
from r3.policy.model import Policy
from r3.policy.packing import Trajectory
from r3.rollout import Request, Response, Sampling
from r3.rollout.native import NativeEngine
from tests.train.tiny import ROOT, command, read_metrics, run_r3

from .models import answers, build, requests_of, teacher_forced


@cache
def bundled() -> Policy:
    return Policy.load(ModelSettings(device="cpu", dtype="bfloat16"))


def sums(n: int = 8) -> list[Request]:
    texts = [f"{a}+{b}=" for a, b in [(12, 30), (7, 8), (99, 1), (45, 54), (3, 4), (81, 19), (6, 66), (17, 29)]]
    prompts = [np.array(bundled().tokenizer(text)["input_ids"], np.int32) for text in texts]
    return [Request(prompt, n, seed=place) for place, prompt in enumerate(prompts)]


def gaps(model: torch.nn.Module, requests: list[Request], got: dict[tuple[int, int], Response]) -> np.ndarray:
    """How far each token's log-prob is from that of the model's own forward over the whole response."""
    parts = []
    for (number, _), response in got.items():
        logits = teacher_forced(model, requests[number].prompt, response.tokens)  # type: ignore[arg-type]
        logs = torch.from_numpy(logits).log_softmax(-1).numpy()
        parts.append(logs[np.arange(len(response.tokens)), response.tokens] - response.logprobs)
    return np.abs(np.concatenate(parts))


@torch.no_grad()
def test_logprobs_and_entropies_are_those_of_the_trainer_s_forward() -> None:
    """Measured: log-probs differ by 0.003 on average and by 0.0001 in sum, entropies by 0.002."""
    policy, requests = bundled(), sums()
    got = answers(NativeEngine(policy.base), requests, Sampling(44, policy.stop_tokens))
    keys = sorted(got)
    sequences = [Trajectory(requests[number].prompt, got[number, index].tokens) for number, index in keys]
    trainer = policy.statistics(sequences, temperature=1.0)
    logprobs, entropies = (np.concatenate([getattr(got[key], name) for key in keys]) for name in (
        "logprobs", "entropies"
    ))  # fmt: skip
    assert len(logprobs) > 500
    gap = trainer.logprobs_T.numpy() - logprobs
    assert np.abs(gap).mean() < 0.01
    assert abs(gap.mean()) < 0.002
    assert np.abs(trainer.entropies_T.numpy() - entropies).mean() < 0.01


def test_greedy_answers_are_those_of_generate() -> None:
    """But for ties that rounding decides: on another processor one of them may fall the other way."""
    policy, requests = bundled(), sums(1)
    got = answers(NativeEngine(policy.base), requests, Sampling(44, policy.stop_tokens, temperature=0))
    same = 0
    for (number, _), response in got.items():
        prompt = torch.from_numpy(requests[number].prompt.astype(np.int64))[None]
        whole = policy.base.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=44)
        same += whole[0, prompt.shape[1] :].tolist() == response.tokens.tolist()
        logits = teacher_forced(policy.base, requests[number].prompt, response.tokens)
        chosen = logits[np.arange(len(response.tokens)), response.tokens]
        assert (logits.max(1) - chosen).max() <= np.abs(logits).max() * 2**-6
    assert same >= len(requests) - 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize(("rows", "pages"), [(20, None), (3, None), (20, 14)])
def test_rows_that_come_and_go_and_are_set_back(architecture: str, rows: int, pages: int | None) -> None:
    model, requests = build(architecture).bfloat16(), requests_of((3, 11, 1, 7, 16), n=4)
    engine = NativeEngine(model, max_rows=rows, page=4 if pages else None, max_pages=pages)
    got = answers(engine, requests, Sampling(24, ()))
    assert bool(engine.preempted) is bool(pages)
    off = gaps(model, requests, got)
    assert off.mean() < 0.03  # weights drawn so large that a rounded logit is off by this much
    assert off.max() < 0.3


@pytest.mark.parametrize(
    ("dtype", "has", "lines"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_a_processor_without_bfloat16_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, has: bool, lines: int
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: has)
    with caplog.at_level(logging.WARNING):
        NativeEngine(build("llama").to(getattr(torch, dtype)))
    assert len(caplog.messages) == lines
    assert all("model.dtype=float32 is faster here" in message for message in caplog.messages)


def test_a_run_killed_and_resumed_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    settings = [
        "model.dtype=bfloat16", "model.device=cpu", "train.steps=4", "train.queries_per_step=4",
        "rollout.group_size=4", "rollout.max_tokens=24", "run.checkpoint_every=2", "run.threads=1", "task.heldout=8",
        "evaluate.every=0",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run_r3("train", *settings, f"run.dir={whole}")
    assert "transformers engine" not in done.stderr, "auto takes native"
    process = subprocess.Popen(
        command("train", "--quiet", *settings, f"run.dir={killed}"), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run_r3("train", "--quiet", "--resume", killed)
    assert read_metrics(killed) == read_metrics(whole)
    last = "checkpoints/step-000004/policy/model.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes()
    assert {tensor.dtype for tensor in load_file(whole / last).values()} == {torch.bfloat16}
