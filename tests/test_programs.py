"""The repository's own programs still run: benchmarks against other systems on a tiny model, and a small part of
`make torture`, where every class of faults is tried and holds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.torture import inputs, runs
from tests.torture.__main__ import classes
from tests.train.tiny import save_model

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = ["--shape", "tiny", "--device", "cpu", "--prompts", "2", "--group", "4", "--mean", "6", "--limit", "12"]


@pytest.mark.parametrize(
    ("script", "child", "options", "expected"),
    [
        (
            "rollout.py",
            "portable",
            ["--engines", "portable", "--cases", "decode-2x8,ragged", "--slow", "--new", "4"],
            2,
        ),
        ("update.py", "ours", ["--steps", "2"], 1),
        ("step.py", "ours-r3", ["--own-engine", "portable", "--steps", "2"], 1),
        ("overhead.py", "both", ["--own-engine", "portable", "--steps", "2"], 2),
    ],
)
def test_measures(script: str, child: str, options: list[str], expected: int, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / script), *SMALL, *options, "--child", child, "--child-out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == expected
    assert all("not measured" not in row for row in rows)


def test_cpu_engines_side_by_side(tmp_path: Path) -> None:
    """Each in a process of its own; vLLM says what is missing, and short work on a busy machine may measure nothing."""
    out = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "rollout_cpu.py"), "--engines", "native-bf16,vllm", "--threads", "1",
               "--cases", "embedded:8x24", "--vllm", str(tmp_path / "none"), "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    native, vllm = json.loads(out.read_text())["rows"]
    assert native["engine"] == "native-bf16"
    assert native.get("threads") == 1 or "took no longer than one" in native["not measured"]
    assert "make vllm-env" in vllm["not measured"]
    assert "| embedded:8x24 | vllm |" in done.stdout


def test_an_engine_that_is_not_there_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "rollout.py"), *SMALL, "--engines", "vllm", "--cases", "decode-2x8"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "| not measured: vLLM" in done.stdout


# `make torture`'s faults on disk.


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


# `make torture`'s bad input, through the command line.

BOUNDED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(BOUNDED, max_examples=30)


@BOUNDED
@given(st.lists(inputs.one_override(), min_size=1, max_size=3))
def test_any_setting(given_: list[str]) -> None:
    assert inputs.settings_fault(given_) is None


@FEW
@given(st.lists(inputs.one_override(), min_size=1, max_size=2))
def test_any_setting_in_a_dry_run(given_: list[str]) -> None:
    assert inputs.dry_fault(given_) is None


@BOUNDED
@given(inputs.recipes())
def test_any_recipe(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assert inputs.recipe_fault(tmp_path_factory.getbasetemp(), content) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    save_model(made / "model")
    return made


@FEW
@given(inputs.data_rows())
def test_any_rows(data: Path, rows: list[object]) -> None:
    assert inputs.rows_fault(data, rows) is None


def test_any_damage_to_a_data_file(data: Path) -> None:
    chance = random.Random(1)
    for _ in range(20):
        assert inputs.damaged_file_fault(data, chance) is None
