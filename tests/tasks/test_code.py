"""Tasks of code: what a row becomes, what is refused, and that little programs are what they say.

Covers r3.tasks.code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.errors import TaskError
from r3.samples import Message
from r3.tasks import load_task
from r3.tasks.code import CodeTask, TinyCodeTask
from r3.tasks.files import FileTask
from r3.tasks.settings import CodeSettings, FileSettings, TinyCodeSettings

DOUBLE = {
    "id": "double",
    "problem": "Write a function to double a number.",
    "tests": ["assert double(2) == 4", "assert double(3) == 6"],
    "setup": "",
}
HALF = {
    "id": "half",
    "problem": 'def half(x: int) -> int:\n    """ Half of x. """\n',
    "entry_point": "half",
    "tests": ["def check(f):\n    assert f(4) == 2\n    assert f(-2) == -1\n\ncheck(half)"],
}
ECHO = {"id": "echo", "problem": "Print the line that is read.", "tests": [{"input": "a\n", "output": "a\n"}]}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def task(tmp_path: Path) -> Iterator[CodeTask]:
    path = written(tmp_path / "rows.jsonl", DOUBLE, HALF, ECHO)
    one = CodeTask(CodeSettings(name="code", path=str(path), heldout=1, chat=False, instruction="Go."))
    yield one
    one.judge.close()


def test_each_kind_of_row_is_asked_in_its_way(task: CodeTask) -> None:
    double, half = task.train
    (echo,) = task.heldout
    shown = "It must pass this test:\n\n```python\nassert double(2) == 4\n```"
    assert double.prompt == f"Write a function to double a number.\n\n{shown}\n\nGo."
    assert half.prompt == f"Complete this function:\n\n```python\n{HALF['problem'].rstrip()}\n```\n\nGo."
    assert "standard input" in str(echo.prompt)
    assert "assert double(3)" not in str(double.prompt)


def test_answers_are_run(task: CodeTask) -> None:
    double, half = task.train
    (echo,) = task.heldout
    assert task.judge.judge(double, "```python\ndef double(x):\n    return x + x\n```").right
    assert "It got 9" in task.judge.judge(double, "def double(x):\n    return x * x").feedback
    assert task.judge.judge(half, "```python\ndef half(x):\n    return x // 2\n```").right
    assert task.judge.judge(echo, "print(input())").right


def test_as_a_chat(tmp_path: Path) -> None:
    task = CodeTask(CodeSettings(name="code", path=str(written(tmp_path / "rows.jsonl", DOUBLE, HALF)), heldout=1))
    (message,) = task.train[0].prompt
    assert isinstance(message, Message)
    assert message.content.endswith("Write the whole function in one block of Python code.")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([DOUBLE, {**DOUBLE, "id": "x", "tests": []}], "row 2: nothing in column 'tests'|row x: .*at least one test"),
        ([DOUBLE, {**DOUBLE, "id": "x", "tests": "assert 1"}], "row x: .*a list"),
        ([DOUBLE, {**DOUBLE, "id": "x", "tests": [{"input": ""}]}], "row x: .*input and output"),
        ([DOUBLE, {"id": "x", "problem": "?"}], "nothing in column 'tests'"),
        ([DOUBLE], "task.heldout=1 keeps that many apart"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused_before_training(tmp_path: Path, rows: list[Any], told: str) -> None:
    path = written(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(TaskError, match=told):
        CodeTask(CodeSettings(name="code", path=str(path), heldout=1))


def test_mbpp_is_a_training_and_a_validation_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3_DATA", str(tmp_path))
    rows = [{**DOUBLE, "id": f"mbpp-{i}"} for i in range(374)]
    written(tmp_path / "train_mbpp.jsonl", *rows)
    with pytest.raises(TaskError, match="valid_mbpp"):
        CodeTask(CodeSettings(name="code", path="mbpp"))
    written(tmp_path / "valid_mbpp.jsonl", *[{**row, "id": f"{row['id']}-valid"} for row in rows[:90]])
    task = CodeTask(CodeSettings(name="code", path="mbpp", heldout=20))
    assert (len(task.train), len(task.heldout)) == (374, 20)
    assert task.heldout[0].id == "mbpp-0-valid"


def test_the_file_task_says_where_code_belongs() -> None:
    with pytest.raises(TaskError, match=r"task\.name=code"):
        FileTask(FileSettings(name="file", path="mbpp"))


def test_leaks_between_sets_of_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = written(tmp_path / "mine.jsonl", DOUBLE, HALF)
    other = written(tmp_path / "other.jsonl", {**HALF, "id": "h", "tests": ["assert half(2) == 1"]})
    assert main(["data", "check", str(mine), "--against", str(other)]) == 1
    assert "exact: half is" in capsys.readouterr().out


def test_saved_answers_are_evaluated_by_running_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = written(tmp_path / "rows.jsonl", DOUBLE, HALF)
    answers = written(
        tmp_path / "answers.jsonl",
        {"id": "double", "response": ["def double(x): return 2 * x", "def double(x): return 4"]},
        {"id": "half", "response": ["```python\n    return x // 2\n```", "import os\nos._exit(0)"]},
    )
    out = tmp_path / "out"
    command = ["eval", "--responses", str(answers), "--tasks", str(rows), "--judge", "code", "--out", str(out)]
    assert main([*command, "--k", "1,2"]) == 0
    judged = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in judged] == ["pass", "fail", "pass", "crashed"]
    results = json.loads((out / "results.json").read_text())
    (figures,) = results["tasks"].values()
    assert [figures["pass@k"][k]["value"] for k in ("1", "2")] == [0.5, 1.0]
    assert json.loads((out / "about.json").read_text())["grader"].startswith("code, ")


def test_little_programs_do_what_their_words_say() -> None:
    task = load_task(TinyCodeSettings(name="code-tiny", difficulty=[2, 3, 5], size=60, heldout=30), seed=0)
    assert isinstance(task, TinyCodeTask)
    try:
        for query in task.train[:20]:
            assert task.judge.judge(query, query.columns["response"]).right, query
            assert not task.judge.judge(query, "x=x").right
            assert not task.judge.judge(query, "x=[]").right
    finally:
        task.judge.close()
    assert {len(query.columns["response"].split("\n")) for query in task.train} == {2, 3, 5}
    assert not {query.id for query in task.train} & {query.id for query in task.heldout}


def test_little_programs_are_the_same_for_a_seed_and_split_by_hash() -> None:
    def asked(split: str, seed: int) -> list[Any]:
        settings = TinyCodeSettings(name="code-tiny", size=40, heldout=10, split=split)  # type: ignore[arg-type]
        return [query.prompt for query in load_task(settings, seed).train]

    assert asked("train", 1) == asked("train", 1) != asked("train", 2)
    assert not set(asked("train", 1)) & set(asked("warm", 1))
    assert all(re.fullmatch(r"[a-z0-9, ]+:\n", str(prompt)) for prompt in asked("warm", 3))


def test_any_program_that_does_the_same_is_right() -> None:
    task = load_task(TinyCodeSettings(name="code-tiny", size=1, heldout=1), seed=0)
    query = replace(task.train[0], columns={"tests": ["assert f([3, 1, 2]) == [3, 2, 1]"]})
    try:
        for program in ("x=sorted(x)\nx=x[::-1]", "x.sort(reverse=True)", "for _ in x:\n  x=sorted(x)\nreturn x[::-1]"):
            assert task.judge.judge(query, program).right
        for program in ("x=sorted(x)", "", "x=", "return", "import os\nos._exit(0)", " return x"):
            assert not task.judge.judge(query, program).right
    finally:
        task.judge.close()


def test_too_few_programs_are_refused() -> None:
    with pytest.raises(TaskError, match="fewer than 5000 different programs"):
        load_task(TinyCodeSettings(name="code-tiny", difficulty=[1], size=5000), seed=0)
    with pytest.raises(TaskError, match="at least one number of steps"):
        load_task(TinyCodeSettings(name="code-tiny", difficulty=[]), seed=0)
