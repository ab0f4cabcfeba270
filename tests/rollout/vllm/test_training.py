"""A whole `r3 train` with vLLM in the trainer's process, on a CPU (make test-vllm)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from r3.cli import main
from tests.train.tiny import overrides, read_metrics

from .models import save_model

MECHANISMS = ("replay/samples", "groups/reflection", "ranking/samples")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "model", seed=1)
    settings = {"rollout__engine": "vllm", "train__epochs": 4, "run__keep_checkpoints": 9}
    assert main(["train", "--quiet", *overrides(folder, **settings)]) == 0
    return folder


def test_all_mechanisms_are_at_work(whole: Path) -> None:
    metrics = read_metrics(whole / "run")
    assert len(metrics) == 9  # the evaluation before training, and 8 steps
    for name in MECHANISMS:
        assert sum(line.get(name) or 0 for line in metrics) > 0, name


def on_policy(run: Path) -> None:
    """In every step the trainer's weights gave each fresh token the probability that vLLM said it had."""
    lines = [line for line in read_metrics(run)[1:] if "update/ratio_max/fresh" in line]
    assert lines
    for line in lines:
        for name in ("p01", "p50", "p99", "max"):
            assert line[f"update/ratio_{name}/fresh"] == pytest.approx(1, abs=1e-4)


def test_every_step_is_drawn_from_the_weights_of_its_time(whole: Path) -> None:
    on_policy(whole / "run")


def test_resumed_it_writes_the_lines_of_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000004":
            shutil.rmtree(checkpoint)
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert read_metrics(run) == read_metrics(whole / "run")


def test_lora(tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=1)
    settings = {"rollout__engine": "vllm", "model__lora__enabled": "true", "model__lora__rank": 4, "train__epochs": 2}
    assert main(["train", "--quiet", *overrides(tmp_path, **settings)]) == 0
    on_policy(tmp_path / "run")
