"""W&B and trackio themselves, offline: what a run sends them, under which names, and that a resume goes on with it.

Neither is skipped where it is missing: both are in the `dev` extra.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import overrides, read_metrics, run_r3

BLOCK = 32_768
LABELS = {"run__project": "spelling", "run__name": "'{method} of {seed}'", "run__group": "seeds", "run__tags": "[a, b]"}


def trained_with_a_step_twice(folder: Path, service: str) -> None:
    """Three steps with a checkpoint after the second and the last, which is lost: the third is made again."""
    settings = overrides(folder, train__steps=3, method="grpo", run__keep_checkpoints=2, **LABELS)
    run_r3("train", "--quiet", *settings, f"run.{service}=true")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000003")
    run_r3("train", "--quiet", "--resume", folder / "run", "train.steps=4")
    assert [line["step"] for line in read_metrics(folder / "run")] == [0, 1, 2, 3, 4]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained_with_a_step_twice(tmp_path, "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    runs, steps = [], []
    for file in files:
        for record in _records(file):
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                steps.append(record.history.step.num)
    for run in runs:
        assert (run.project, run.display_name, run.run_group, list(run.tags)) == (
            "spelling",
            "grpo of 1",
            "seeds",
            ["a", "b"],
        )
    assert len({run.run_id for run in runs}) == 1
    assert steps == [0, 1, 2, 3, 4]


def _records(path: Path) -> Iterator[Any]:
    """What is in a W&B file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, text = path.read_bytes(), 7, b""
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # a header does not fit: the block's end is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        text += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or a last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield record
            text = b""


def test_trackio_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained_with_a_step_twice(tmp_path, "trackio")
    (database,) = (tmp_path / "trackio").glob("spelling*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        steps = connection.execute("select run_name, step from metrics order by step").fetchall()
        (config,) = connection.execute("select config from configs").fetchone()
    (name,) = {name for name, _ in steps}
    assert name.startswith("grpo of 1-")
    assert [step for _, step in steps] == [0, 1, 2, 3, 4]
    assert json.loads(config)["run"]["tags"] == ["a", "b"]
