"""Demonstrations, hints and feedback of a task's queries: named columns of a file, and what made tasks write."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.errors import TaskError
from r3.tasks import load_task
from r3.tasks.arithmetic import Problem
from r3.tasks.settings import (
    ArithmeticSettings,
    CodeSettings,
    FileSettings,
    GradedArithmeticSettings,
    ReasoningGymSettings,
    TaskSettings,
    TinyCodeSettings,
)
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides
from tools.writer import CAREFUL, write_working

NAMED = {"demonstration_column": "trace", "hint_column": "tips", "feedback_column": "critic"}


def save(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(i: int, **more: Any) -> dict[str, Any]:
    help = {"trace": f"It is \\boxed{{{i}}}", "tips": ["think", "add"], "critic": "count again"}
    return {"problem": f"{i} + 0 = ?", "answer": str(i), **help, **more}


def load(path: str, **columns: str) -> Any:
    return load_task(FileSettings(name="file", path=path, heldout=1, **columns), seed=0)


def test_a_file_names_its_columns(tmp_path: Path) -> None:
    rows = [row(1), row(2, tips="just one"), row(3, trace=None, tips=None, critic=" "), row(4)]
    path = save(tmp_path / "rows.jsonl", rows)
    queries = load(path, **NAMED).train
    assert [q.demonstration for q in queries] == ["It is \\boxed{1}", "It is \\boxed{2}", ""]
    assert [q.hints for q in queries] == [("think", "add"), ("just one",), ()]
    assert [q.feedback for q in queries] == ["count again", "count again", ""]
    assert all((q.demonstration, q.hints, q.feedback) == ("", (), "") for q in load(path).train)


def test_held_out_files_need_none(tmp_path: Path) -> None:
    path = save(tmp_path / "rows.jsonl", [row(1)])
    other = save(tmp_path / "other.jsonl", [{"problem": "9?", "answer": "9"}])
    settings = FileSettings(name="file", path=path, heldout_path=other, **NAMED)
    assert load_task(settings, 0).train[0].hints == ("think", "add")


def test_a_csv_holds_one_hint(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["problem", "answer", "tips"], ["1?", "1", "count"], ["2?", "2", ""], ["3?", 3, "x"]]
        )
    assert [q.hints for q in load(str(path), hint_column="tips").train] == [("count",), ()]


def test_code_has_them_too(tmp_path: Path) -> None:
    rows = [{"problem": f"Return {i}.", "tests": [f"assert f() == {i}"], "trace": "x", "tips": "y"} for i in range(3)]
    settings = CodeSettings(
        name="code",
        path=save(tmp_path / "code.jsonl", rows),
        heldout=1,
        demonstration_column="trace",
        hint_column="tips",
    )
    task = load_task(settings, 0)
    task.judge.close()
    assert [(q.demonstration, q.hints) for q in task.train] == [("x", ("y",))] * 2


@pytest.mark.parametrize(
    ("setting", "changed", "message"),
    [
        ("demonstration_column", {"trace": 7}, "row 2: a int in column 'trace' (task.demonstration_column)"),
        ("feedback_column", {"critic": ["a"]}, "row 2: a list in column 'critic' (task.feedback_column)"),
        ("hint_column", {"tips": ["a", ""]}, "row 2: column 'tips' (task.hint_column) holds neither a text nor a list"),
        ("hint_column", {"tips": {"a": "b"}}, "write each hint as a text that is not empty"),
        ("hint_column", {"tips": ["a", "\ud800"]}, "half a character"),
    ],
)
def test_bad_cells_are_refused(tmp_path: Path, setting: str, changed: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "rows.jsonl", [row(1), row(2, **changed), row(3)])
    with pytest.raises(TaskError) as refusal:
        load(path, **{setting: NAMED[setting]})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_column_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", *overrides(tmp_path), "task.hint_column=hints")
    assert "row 1: no column 'hints' (there are id, problem, answer); correct task.hint_column" in line
    assert not (tmp_path / "run").exists()


def test_a_resume_notices_other_hints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i, answer="30", id=f"q{i}") for i in range(8)]
    save(tmp_path / "task.jsonl", rows)
    settings = overrides(tmp_path, task__hint_column="tips", train__steps=2)
    assert main(["train", "--quiet", *settings]) == 0
    capsys.readouterr()
    # The judge gets all columns, so that a changed one is changed data as well.
    save(tmp_path / "task.jsonl", [{**r, "tips": ["other"]} for r in rows])
    line = refused(capsys, "train", "--resume", tmp_path / "run", "train.steps=3", code=1)
    assert "the training data" in line
    assert "the demonstrations, hints or feedback changed since the run began" in line


def test_the_embedded_sums_have_right_working(tmp_path: Path) -> None:
    task = load_task(ArithmeticSettings(difficulty=[2, 3, 6, 9], size=24, heldout=8), seed=3)
    for query in task.train:
        terms = tuple(map(int, query.prompt.rstrip("=").split("+")))
        assert query.demonstration == write_working(Problem(terms), random.Random(0), CAREFUL)
        assert all(query.demonstration.startswith(hint) and "#" not in hint for hint in query.hints)
        assert sorted(set(query.hints), key=len) == list(query.hints)
        assert len(query.hints) == min(3, len(terms) - 1)
        assert all(hint.rpartition("=")[2].isdigit() for hint in query.hints)  # whole steps


@pytest.mark.parametrize(
    "settings",
    [
        ArithmeticSettings(size=8),
        GradedArithmeticSettings(name="graded-arithmetic", size=8),
        TinyCodeSettings(name="code-tiny", size=4),
        ReasoningGymSettings(name="reasoning-gym", family="number_sorting", size=4),
    ],
)
def test_what_made_tasks_demonstrate_is_right(settings: TaskSettings) -> None:
    if isinstance(settings, ReasoningGymSettings):
        pytest.importorskip("reasoning_gym")
    task = load_task(settings, seed=1)
    try:
        assert all(task.judge.judge(query, query.demonstration).right for query in task.train)
        assert all(query.hints for query in task.train)
    finally:
        task.judge.close()
