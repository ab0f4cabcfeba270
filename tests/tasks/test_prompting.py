"""What is made of a question: templates, system prompts, chats in a column, instructions where a box is judged.

Covers r3.tasks.task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from r3.cli import main
from r3.config import load_config
from r3.errors import TaskError
from r3.samples import Message
from r3.tasks import load_task
from r3.tasks.files import FileTask
from r3.tasks.settings import FileSettings
from r3.tasks.task import INSTRUCTION
from tests.train.tiny import overrides

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
