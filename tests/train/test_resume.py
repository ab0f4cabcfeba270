"""Killed with SIGKILL anywhere and resumed, a run writes the lines that it would have written uninterrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3

SETTINGS = {"train__epochs": 4, "run__checkpoint_every": 3}  # 8 steps, an epoch is 2; checkpoints at 3, 6 and 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_r3("train", "--quiet", *overrides(folder, **SETTINGS))
    return folder


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda run: any(run.glob(pattern))


def lines(count: int) -> Callable[[Path], bool]:
    def reached(run: Path) -> bool:
        path = run / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= count

    return reached


# Moments found by what is on disk: no clock is involved, and each is somewhere else in the loop.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before the first checkpoint": lines(2),
    "while a checkpoint is written": exists("checkpoints/.step-000003.tmp-*"),
    "after the checkpoint, in the middle of a step": exists("checkpoints/step-000003"),
    "at an epoch's end": lines(5),
    "after rollouts, before metrics": exists("rollouts/step-000006.jsonl.gz"),
    "while the second checkpoint is written": exists("checkpoints/.step-000006.tmp-*"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, uninterrupted: Path, moment: str) -> None:
    run = tmp_path / "run"
    arguments = overrides(
        tmp_path, **SETTINGS, model__path=uninterrupted / "model", task__path=uninterrupted / "task.jsonl"
    )
    process = subprocess.Popen(command("train", "--quiet", *arguments), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not MOMENTS[moment](run):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    run_r3("train", "--quiet", "--resume", run)
    assert read_metrics(run) == read_metrics(uninterrupted / "run")
    assert contents(tmp_path) == contents(uninterrupted)
    last = "checkpoints/step-000008/policy/model.safetensors"
    assert (run / last).read_bytes() == (uninterrupted / "run" / last).read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_in_a_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, uninterrupted: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    arguments = overrides(
        tmp_path, **SETTINGS, model__path=uninterrupted / "model", task__path=uninterrupted / "task.jsonl"
    )
    process = subprocess.Popen(
        command("train", "--quiet", *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(number)
            break
    _, errors = process.communicate()
    assert process.returncode == code
    assert f"r3 train --resume {run}" in errors
    assert any((run / "checkpoints").glob("step-*"))
    run_r3("train", "--quiet", "--resume", run)
    assert read_metrics(run) == read_metrics(uninterrupted / "run")
