"""Tasks from files: formats, ids, the boxed judge, a judge of the user's own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from r3.config import TaskSettings
from r3.samples import Message, Query
from r3.tasks.files import FileTask, boxed_verdict, last_boxed

ROWS = [{"problem": f"{i} + {i} = ?", "answer": str(2 * i), "level": i} for i in range(1, 6)]


def write(path: Path) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet"])
def test_every_format_gives_the_same_queries(tmp_path: Path, name: str) -> None:
    settings = TaskSettings(name="file", path=str(write(tmp_path / name)), heldout=2, instruction="Box it.")
    task = FileTask(settings)
    assert [q.answer for q in task.train] == ["2", "4", "6"]
    assert [q.answer for q in task.heldout] == ["8", "10"]
    assert task.train[0].prompt == (Message("user", "1 + 1 = ?\n\nBox it."),)
    reference = FileTask(TaskSettings(name="file", path=str(write(tmp_path / "again.jsonl")), heldout=2))
    assert [q.id for q in task.train] == [q.id for q in reference.train]  # ids are hashes of the question: stable


def nearly(completion: str, answer: str, level: int, **_: Any) -> bool:
    return abs(float(completion) - float(answer)) <= level


def test_a_judge_of_ones_own_gets_the_columns(tmp_path: Path) -> None:
    settings = TaskSettings(
        name="file", path=str(write(tmp_path / "rows.jsonl")), heldout=0, verifier="tests.tasks.test_files.nearly"
    )
    task = FileTask(settings)
    assert task.verify(task.train[4], "14").right
    assert not task.verify(task.train[0], "4").right


@pytest.mark.parametrize(
    ("completion", "right", "reason"),
    [
        (r"so \boxed{42}", True, "match"),
        (r"so \boxed{ 42 }.", True, "match"),
        (r"\boxed{41} no, \boxed{42}", True, "match"),
        (r"\boxed{42} no, \boxed{41}", False, "other answer"),
        (r"\boxed{}", False, "empty box"),
        (r"\boxed{42", False, "no box"),
        ("42", False, "no box"),
    ],
)
def test_the_boxed_judge(completion: str, right: bool, reason: str) -> None:
    verdict = boxed_verdict(Query("q", "?", "42"), completion)
    assert (verdict.right, verdict.reason) == (right, reason)


def test_boxes_may_nest() -> None:
    assert last_boxed(r"\boxed{\frac{1}{2}} .") == r"\frac{1}{2}"
    assert boxed_verdict(Query("q", "?", r"\frac{1}{2}"), r"\boxed{\frac{1}{2}}").right
