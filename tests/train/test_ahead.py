"""`rollout.ahead=1`: a step's answers are drawn while the last update runs, and the run is as exact as any other."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from r3.cli import main
from r3.errors import DIVERGED
from r3.run.directory import RunFiles
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.test_resume import MOMENTS
from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3

# 8 steps; every mechanism, with queries asked in the place of groups without variance and some before their turn.
SETTINGS = {
    "rollout__ahead": 1,
    "train__epochs": 5,
    "run__checkpoint_every": 3,
    "method__resample__enabled": "true",
    "method__revisit__enabled": "true",
}
CAP = 2.0


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("r3-ahead")]
    return read_metrics(folder / "run")


def logprobs_of(weights: Path, row: dict[str, Any]) -> np.ndarray:
    """Of a row's response, by a plain forward of the model in that folder."""
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
    run_r3("train", "--quiet", "--resume", tmp_path / "run")
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
