"""A small part of `make torture`: every class of faults is tried, and holds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.torture import runs
from tests.torture.__main__ import classes
from tests.train.tiny import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("torture")
    save_model(made / "model")
    runs.make_runs(made)
    return made


def test_damaged_runs_resume_exactly_or_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        assert runs.damage_fault(folder, random.Random(number)) is None
    for damage in (pipe_for_metrics, zeros_in_weights):
        monkeypatch.setattr(runs, "_damage", damage)
        assert runs.damage_fault(folder, random.Random(0)) is None


def pipe_for_metrics(run: Path, _: random.Random) -> str:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    return "a pipe for metrics"


def zeros_in_weights(run: Path, _: random.Random) -> str:
    path = run / "checkpoints" / "step-000004" / "policy" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-64] + bytes(64))
    return "zeros in the weights"


@pytest.mark.parametrize("fault", [runs.full_disk_fault, runs.checkpoint_fault])
def test_full_disks(fault: object, folder: Path) -> None:
    for number in range(3):
        assert fault(folder, random.Random(number)) is None  # type: ignore[operator]


def test_every_class_has_a_name_and_a_count(folder: Path) -> None:
    assert all(tries >= 20 for _, tries in classes(folder).values())
    tried = classes(folder)["disk full in a checkpoint"][0](7, 3)
    assert (tried.tried, tried.failures) == (3, [])
