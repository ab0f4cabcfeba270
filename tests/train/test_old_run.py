"""A run directory that an earlier version wrote (tests/data) opens in every command, and its training goes on."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.train.tiny import ROOT, read_metrics

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "data" / "run_of_0.1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    return tmp_path / "run"


def test_it_is_of_an_earlier_version(run: Path) -> None:
    """Otherwise the other tests would show nothing."""
    config = (run / "config.yaml").read_text()
    assert "inputs" not in json.loads((run / "run.json").read_text())
    assert not (run / "checkpoints" / f"step-{STEPS:06d}" / "buffer.json").exists()
    # The settings of every family of tasks in one section, of which most are refused in a recipe today.
    assert {"difficulty", "family"} <= {line.strip().partition(":")[0] for line in config.splitlines()}


def test_it_shows_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert f"finished, step {STEPS} of {STEPS}" in capsys.readouterr().out
    query = open_runs([run])[0].tables.table(2).summaries[0]["query"]
    assert main(["show", str(run), "--group", f"2/{query}"]) == 0
    assert "advantage" in capsys.readouterr().out


def test_every_page_of_the_viewer_has_an_answer(run: Path) -> None:
    viewed = open_runs([run])[0]
    viewed.queries.refresh()
    api = Api([viewed])
    assert viewed.state()["problems"] == []
    assert api.answer("metrics", {})["steps"] == [0, *range(1, STEPS + 1)]
    assert api.answer("steps", {})["steps"] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        groups = api.answer("step", {"step": str(step)})["groups"]
        for number in range(len(groups)):
            group = api.answer("group", {"step": str(step), "group": str(number)})
            assert group["kept"]
            sample = api.answer("sample", {"step": str(step), "group": str(number), "sample": "0"})
            assert len(sample["entropies"]) == len(sample["tokens"]) > 0
    assert "problem" not in api.answer("buffer", {})
    assert api.answer("queries", {})["known"] > 0
    settings = api.answer("settings", {})
    values = {row["key"]: row["value"] for section in settings["sections"] for row in section["settings"]}
    assert values["rollout.group_size"] == 4
    assert values["task.difficulty"] == [3, 4, 5, 6, 7, 8]  # as the file has it, though no such setting is left


def test_its_checkpoint_can_be_evaluated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--samples", "2", "--out", str(tmp_path / "evaluation")]) == 0
    assert f"run step {STEPS}" in capsys.readouterr().out


def test_its_training_goes_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        newest = buffer.stats().newest_step
    assert main(["train", "--quiet", "--resume", str(run), f"train.steps={STEPS + 2}"]) == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    assert [line["step"] for line in read_metrics(run)] == list(range(STEPS + 3))
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        assert (newest, buffer.stats().newest_step) == (STEPS, STEPS + 2)
        assert buffer.check() == []
    assert [note.getMessage().count("\n") for note in caplog.records] == [0] * len(caplog.records)
    notes = json.loads((run / "run.json").read_text())["resumes"][0]
    assert (notes["step"], notes["settings"]) == (STEPS, {"train.steps": STEPS + 2})


def test_another_setting_is_refused_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, before := run.with_name("before"))
    assert main(["train", "--resume", str(run), "rollout.group_size=8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with other settings (rollout.group_size)" in line
    assert (run / "metrics.jsonl").read_bytes() == (before / "metrics.jsonl").read_bytes()
