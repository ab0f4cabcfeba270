"""`r3 eval RUN_DIR`: what a run trained, on its own problems, under its own prompts and rewards, or as one asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.run import RunFiles
from tests.train.tiny import overrides, run_r3

LIMITS = ["--samples", "2", "--device", "cpu", "--temperature", "1"]


def graded(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """As `tests.train.tiny.judge`, and worth less than that makes right by default."""
    shares = zip(completions, answer, strict=True)
    return [0.4 * (bool(text) and (ord(text[0]) * 7919 % 100) < float(share)) for text, share in shares]


def brief(completion: str) -> float:
    return 1 / (1 + len(completion))


def never(completion: str, **_: Any) -> bool:
    return False


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with checkpoints at the second and the last; a reward of one's own, a template with a column."""
    folder = tmp_path_factory.mktemp("trained")
    named = [f"{{function: tests.evaluate.test_eval_run.{name}, weight: 2}}" for name in ("graded", "brief")]
    rewards = [f"task.rewards=[{', '.join(named)}]", "task.outcome=graded", "task.right_above=0.3"]
    asked = "task.template='{id}: {question}'"
    settings = overrides(folder, train__epochs=2, run__keep_checkpoints=9)
    own = [setting for setting in settings if not setting.startswith("task.verifier")]
    run_r3("train", "--quiet", *own, *rewards, asked)
    assert RunFiles(folder / "run").checkpoints.steps() == [2, 4]
    return folder / "run"


def evaluated(folder: Path, *arguments: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert main(["eval", *map(str, arguments), *LIMITS, "--out", str(folder)]) == 0
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), rows


def test_its_own_task_prompts_and_rewards(run: Path, tmp_path: Path) -> None:
    found, rows = evaluated(tmp_path, run, "--temperature", "0")
    assert found["model"] == "run step 4"
    assert found["about"]["max_tokens"] == 12
    assert found["tasks"]["task"]["problems"] == 4
    for row in rows:
        expected = graded([row["response"]], [str([0, 10, 30, 60, 90, 100][int(row["id"][1:]) % 6])])[0] > 0.3
        assert row["right"] == (expected and not row["truncated"])
    assert any(row["right"] for row in rows)
    finished = [row for row in rows if not row["truncated"]]
    for row in finished:
        assert row["scores"]["brief"] == pytest.approx(2 / (1 + len(row["response"])))
    mean = 2 * sum(brief(row["response"]) for row in finished) / len(rows)
    assert found["tasks"]["task"]["rewards"]["brief"] == pytest.approx(mean)
    (line,) = [line for line in (tmp_path / "results.md").read_text().splitlines() if "mean reward/brief" in line]
    assert "mean reward/graded" in line


def test_two_checkpoints_lie_side_by_side(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in ("4", "2"):
        assert main(["eval", str(run), "--step", step, *LIMITS]) == 0
    assert {path.name for path in (tmp_path / "evals" / "run").iterdir()} == {
        "step-000002",
        "step-000004",
        "results.md",
    }
    table = (tmp_path / "evals" / "run" / "results.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["run step 2", "run step 4"]
    assert table[-1] in capsys.readouterr().out


def test_another_judge_template_and_set(run: Path, tmp_path: Path) -> None:
    found, rows = evaluated(tmp_path / "never", run, "--judge", "tests.evaluate.test_eval_run.never")
    assert not any(row["right"] for row in rows)
    assert found["about"]["grader"].startswith("tests.evaluate.test_eval_run.never, ")
    _, plain = evaluated(tmp_path / "plain", run)
    found, other = evaluated(tmp_path / "other", run, "--template", "{question} {answer}?")
    assert found["about"]["template"] == "{question} {answer}?"
    assert [row["response"] for row in plain] != [row["response"] for row in other]
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"id": "x", "asked": "1+1", "wanted": "100"}) + "\n")
    columns = ["--question-column", "asked", "--answer-column", "wanted"]
    judge = ["--judge", "tests.train.tiny.judge"]
    found, rows = evaluated(tmp_path / "mine", run, "--tasks", mine, *columns, *judge)
    assert found["tasks"][str(mine)]["problems"] == 1
    assert all(row["right"] != row["truncated"] for row in rows if row["response"])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["RUN", "--step", "3"], 1, "no checkpoint of step 3; there are 2, 4 (run.keep_checkpoints)"),
        (["embedded", "--step", "3"], 2, "--step names a checkpoint of a run"),
        (["embedded", "--tasks", "task"], 2, "give the directory of a run as MODEL"),
        (["RUN", "--judge", "no.such.judge"], 2, "no.such.judge: cannot import it"),
        (["RUN", "--system", "Be brief."], 2, "system and chat_options are for chats, and chat=false"),
        (["RUN", "--template", "{question} {levl}"], 2, "task.template asks for {levl}"),
        (["RUN", "--question-column", "nothing"], 2, "nothing in column 'nothing'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    run: Path, tmp_path: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run) if argument == "RUN" else argument for argument in arguments]
    assert main(["eval", *given, *LIMITS, "--out", str(tmp_path / "out")]) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
