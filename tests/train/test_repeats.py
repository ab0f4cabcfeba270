"""The same question under two ids, or twice in a batch: refused, or said in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, save_task


def train(folder: Path, rows: list[dict[str, Any]], **more: Any) -> list[str]:
    task = folder / "rows.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["train", "--quiet", *overrides(folder, task__path=task, train__steps=1, **more)]


def rows_of(folder: Path, *changed: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in save_task(folder / "made.jsonl").read_text().splitlines()]
    for number, change in changed:
        rows[number] |= change
    return rows


def test_a_question_with_two_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path, (3, {"problem": "What is 0 + 0?"}))
    line = refused(capsys, *train(tmp_path, rows))
    assert "row 4: the question of row 1 with another answer ('60', there '0')" in line
    assert not (tmp_path / "run").exists()
    rows = rows_of(tmp_path, (3, {"id": "q0"}))
    assert "row 4: id 'q0' appears twice" in refused(capsys, *train(tmp_path, rows))


def test_a_question_under_two_ids_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(tmp_path, (6, {"problem": "What is 0 + 0?"}), (11, {"problem": "What is 1 + 1?", "answer": "10"}))
    assert main(train(tmp_path, rows)) == 0
    assert "1 training queries repeat the text of another" in caplog.text
    assert "1 held-out problems have the very text of a training query" in caplog.text


def test_a_batch_larger_than_the_task_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(train(tmp_path, rows_of(tmp_path), train__queries_per_step=9)) == 0
    assert "train.queries_per_step=9, and there are 8 training queries" in caplog.text
    caplog.clear()
    (tmp_path / "other").mkdir()
    assert main(train(tmp_path / "other", rows_of(tmp_path), train__queries_per_step=8)) == 0
    assert "training queries" not in caplog.text
