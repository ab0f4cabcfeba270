"""Tasks from files: formats, ids, judges; demonstrations, hints and feedback; what is made of a question.

Covers r3.tasks.data_files, r3.tasks.task, r3.tasks.settings.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from r3.cli import main
from r3.config import load_config
from r3.errors import TaskError
from r3.samples import Message, Query
from r3.tasks import load_task
from r3.tasks.datasets import load_file
from r3.tasks.files import FileTask, boxed_verdict
from r3.tasks.settings import (
    CodeSettings,
    FileSettings,
)
from r3.tasks.task import INSTRUCTION
from r3.verify import VerifierError
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides

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


# Demonstrations, hints and feedback of a task's queries, from named columns of a file.


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


# What is made of a question: templates, system prompts, chats in a column, instructions where a box is judged.


CHAT = [
    {"role": "system", "content": "You are a clerk."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "What is 2+2?"},
]


def task_of(path: Path, *rows: dict[str, Any], **settings: Any) -> FileTask:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileTask(FileSettings(name="file", path=str(path), heldout=0, **settings))


def test_a_system_prompt_and_a_template_with_columns(tmp_path: Path) -> None:
    rows = [{"problem": "Is {x} even?", "answer": "yes", "level": 3}]
    template = "Level {level}: {question} Write \\boxed{} or {{x}}."
    task = task_of(tmp_path / "rows.jsonl", *rows, system="Be brief.", template=template, instruction="Go on.")
    asked = "Level 3: Is {x} even? Write \\boxed{} or {x}.\n\nGo on."
    assert task.train[0].prompt == (Message("system", "Be brief."), Message("user", asked))
    assert task.train[0].instruction == "Go on."
    assert task.train[0].columns["problem"] == "Is {x} even?"
    plain = task_of(tmp_path / "rows.jsonl", *rows, chat=False, template="Q: {question}\nA:", instruction="")
    assert plain.train[0].prompt == "Q: Is {x} even?\nA:"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_chat_in_a_column_is_asked_as_it_is(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": CHAT, "answer": "4"}, {"messages": CHAT[-1:], "answer": "4"}]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = FileSettings(
        name="file", path=str(path), heldout=0, question_column="messages", system="Be brief.", instruction="Box it."
    )
    long, short = FileTask(settings).train
    assert [turn.role for turn in long.prompt] == ["system", "user", "assistant", "user"]
    assert long.prompt[0].content == "You are a clerk."  # its own system prompt comes before task.system
    assert long.prompt[-1].content == "What is 2+2?\n\nBox it."
    assert short.prompt == (Message("system", "Be brief."), Message("user", "What is 2+2?\n\nBox it."))
    assert long.id != short.id
    assert long.columns["problem"] == short.columns["problem"] == "What is 2+2?"


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"problem": ["a", "b"]}, {}, "row 1, column 'problem': a list, but not of messages"),
        ({"problem": [{"role": "user", "content": [{"type": "text"}]}]}, {}, "content is a list, not a text"),
        ({"problem": CHAT[:3]}, {}, "must end with a user's turn"),
        ({"problem": []}, {}, "must end with a user's turn"),
        ({"problem": CHAT}, {"chat": False}, "row 1: the question is a chat: set task.chat=true"),
        (
            {"problem": "?"},
            {"template": "{question} {levl}"},
            "row 1: task.template asks for {levl}, and there are answer",
        ),
    ],
)
def test_what_makes_no_prompt_is_refused_by_row(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskError) as caught:
        task_of(tmp_path / "rows.jsonl", {"answer": "4", **row}, **settings)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "instruction"),
    [
        ({}, INSTRUCTION),
        ({"verifier": "boxed"}, INSTRUCTION),
        ({"verifier": "tests.train.tiny.judge"}, ""),
        ({"rewards": "tests.train.tiny.judge"}, ""),
        ({"rewards": "correct"}, INSTRUCTION),
        ({"rewards": ["tests.train.tiny.judge", "boxed"], "outcome": "judge"}, INSTRUCTION),
        ({"verifier": "tests.train.tiny.judge", "instruction": "Go."}, "Go."),
    ],
)
def test_a_box_is_asked_for_where_one_is_judged(tmp_path: Path, settings: dict[str, Any], instruction: str) -> None:
    task = task_of(tmp_path / "rows.jsonl", {"problem": "?", "answer": "4"}, **settings)
    assert task.train[0].instruction == instruction
    assert task.train[0].prompt[-1].content == ("?\n\n" + instruction if instruction else "?")


def test_settings_that_contradict_each_other_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, says in (
        ("task.system=Hi", "system and chat_options are for chats, and chat=false"),
        ("task.chat_options={tokenize: true}", "tokenize: set by r3 itself"),
    ):
        assert main(["train", "--quiet", *overrides(tmp_path), setting]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_made_tasks_are_prompted_in_the_same_way() -> None:
    given = ["task.name=graded-arithmetic", "task.size=1", "task.heldout=1", "task.system=Be brief."]
    task = load_task(load_config(None, [*given, "task.template='Now: {question}'"]).task, seed=0)
    system, asked = task.train[0].prompt
    assert isinstance(system, Message)
    assert system.content == "Be brief."
    assert asked.content.startswith("Now: Compute ")
    assert asked.content.endswith(INSTRUCTION)
