"""Tasks from files: formats, ids, the boxed judge, a judge of the user's own.

Covers r3.tasks.data_files, r3.tasks.settings.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from r3.errors import TaskError
from r3.samples import Message, Query
from r3.tasks.datasets import load_file
from r3.tasks.files import FileTask, boxed_verdict
from r3.tasks.settings import FileSettings
from r3.verify import VerifierError

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
    settings = FileSettings(name="file", path=str(write(tmp_path / name)), heldout=2, instruction="Box it.")
    task = FileTask(settings)
    assert [q.answer for q in task.train] == ["2", "4", "6"]
    assert [q.answer for q in task.heldout] == ["8", "10"]
    assert task.train[0].prompt == (Message("user", "1 + 1 = ?\n\nBox it."),)
    reference = FileTask(FileSettings(name="file", path=str(write(tmp_path / "again.jsonl")), heldout=2))
    assert [q.id for q in task.train] == [q.id for q in reference.train]  # ids are hashes of the question: stable


def nearly(completion: str, answer: str, level: int, **_: Any) -> bool:
    return abs(float(completion) - float(answer)) <= level


def test_a_judge_of_ones_own_gets_the_columns(tmp_path: Path) -> None:
    settings = FileSettings(
        name="file", path=str(write(tmp_path / "rows.jsonl")), heldout=0, verifier="tests.tasks.test_files.nearly"
    )
    task = FileTask(settings)
    assert task.judge.judge(task.train[4], "14").right
    assert not task.judge.judge(task.train[0], "4").right


@pytest.mark.parametrize(
    ("completion", "right", "reason"),
    [
        (r"so \boxed{42}", True, "match"),
        (r"so \boxed{ 42 }.", True, "match"),
        (r"\boxed{41} no, \boxed{42}", True, "match"),
        (r"\boxed{42} no, \boxed{41}", False, "different"),
        (r"\boxed{}", False, "empty box"),
        (r"\boxed{42", False, "unclosed box"),
        (r"<think>\boxed{41}</think> \boxed{42}", True, "match"),
        ("42", False, "no box"),
    ],
)
def test_the_boxed_judge(completion: str, right: bool, reason: str) -> None:
    verdict = boxed_verdict(Query("q", "?", "42"), completion)
    assert (verdict.right, verdict.reason) == (right, reason)


def test_boxes_may_nest() -> None:
    assert boxed_verdict(Query("q", "?", r"\frac{1}{2}"), r"\boxed{\frac{1}{2}}").right


def raises(completion: str, **_: Any) -> bool:
    raise ZeroDivisionError("by hand")


def test_a_judge_that_raises_stops_the_run_by_name_or_is_counted_in_the_cage(tmp_path: Path) -> None:
    options = {"name": "file", "path": str(write(tmp_path / "rows.jsonl")), "heldout": 0}
    task = FileTask(FileSettings(**options, verifier="tests.tasks.test_files.raises"))
    with pytest.raises(VerifierError, match=r"raised ZeroDivisionError \(by hand\) on query .*task.caged=true"):
        task.judge.judge(task.train[0], "2")
    caged = FileTask(FileSettings(**options, verifier="tests.tasks.test_files.raises", caged=True))
    try:
        verdict = caged.judge.judge(caged.train[0], "2")
    finally:
        caged.judge.close()
    assert (verdict.right, verdict.reason) == (False, "error")


def test_maths_answers_are_judged_symbolically_by_default(tmp_path: Path) -> None:
    task = FileTask(FileSettings(name="file", path=str(write(tmp_path / "rows.jsonl")), heldout=0))
    try:
        assert task.judge.judge(task.train[0], r"so \boxed{\frac{6}{3}}").right
        assert not task.judge.judge(task.train[0], r"so \boxed{3}").right
    finally:
        task.judge.close()


def test_filters_by_difficulty_and_length(tmp_path: Path) -> None:
    path = tmp_path / "graded.jsonl"
    rows = [{"problem": "x" * n, "answer": "1", "difficulty": 10.0 * n} for n in range(1, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"name": "file", "path": str(path), "heldout": 0, "chat": False, "instruction": ""}

    def length(query: Query) -> int:
        return len(query.prompt)

    graded = FileTask(FileSettings(**options, min_difficulty=20, max_difficulty=50, max_prompt_tokens=4), length)
    assert [q.prompt for q in graded.train] == ["xx", "xxx", "xxxx"]
    with pytest.raises(TaskError, match="none of the 6 problems"):
        FileTask(FileSettings(**options, min_difficulty=90), length)


def test_named_sets_are_found_in_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3_DATA", str(Path(__file__).parents[1] / "data"))
    task = FileTask(FileSettings(name="file", path="aime24", heldout_path="aime25", heldout=30))
    assert (len(task.train), len(task.heldout)) == (30, 30)
    with pytest.raises(TaskError, match="R3_DATA"):
        FileTask(FileSettings(name="file", path="deepscaler"))


def test_a_csv_file_is_read_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_text('﻿problem,answer,note\n"What is 1, 2 and ""3""\ntogether?",6,\n2+2?,4,easy\n', encoding="utf-8")
    first, second = load_file(path)
    assert (first.columns["problem"], first.answer) == ('What is 1, 2 and "3"\ntogether?', "6")
    assert (first.columns["note"], second.columns["note"]) == (None, "easy")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"problem,answer\na,b,c\n", "line 2: not the 2 columns"),
        (b"problem,answer\na\n", "line 2: not the 2 columns"),
        (b"problem,problem\na,b\n", "each once"),
        (b"problem,answer\na,\n", "nothing in column 'answer'"),
        (b"problem,answer\n\xff,1\n", "not CSV in UTF-8"),
        (b'problem,answer\n"a,1\n', "not CSV"),
        (b"", "holds no problems"),
    ],
)
def test_a_broken_csv_file_says_where(tmp_path: Path, text: bytes, told: str) -> None:
    path = tmp_path / "my.csv"
    path.write_bytes(text)
    with pytest.raises(TaskError, match=told):
        load_file(path)
