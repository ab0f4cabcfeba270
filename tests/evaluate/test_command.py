"""`r3 eval` as a user runs it: a model, a run's directory, and responses saved elsewhere.

Covers r3.commands.eval, r3.commands.eval_tasks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from r3.cli import main
from r3.commands.eval import run
from r3.errors import ConfigError, TaskError
from r3.run import RunFiles
from tests.scripted import arguments_of, brief, graded
from tests.train.tiny import overrides

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
SMALL = ["embedded", "--tasks", "arithmetic", "--limit", "10", "--samples", "4", "--device", "cpu", "--max-rows", "8"]


def evaluated(out: Path, *arguments: object) -> dict[str, Any]:
    assert run(arguments_of(*map(str, arguments), "--out", str(out))) == 0
    return dict(json.loads((out / "results.json").read_text()))


def in_process(die_at: int, *arguments: object) -> int:
    command = [sys.executable, "-m", "tests.scripted", str(die_at), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def test_the_embedded_model_on_the_embedded_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(tmp_path, *SMALL, "--max-tokens", "20,30,44", "--k", "1,2,4", "--parquet")
    task = found["tasks"]["arithmetic"]
    assert (task["problems"], task["samples"]) == (10, 4)
    assert 0 < task["pass@k"]["1"]["value"] < task["pass@k"]["4"]["value"] <= 1
    assert task["pass@k"]["1"]["low"] < task["pass@k"]["1"]["value"] < task["pass@k"]["1"]["high"]
    assert found["about"]["temperature"] == 0.6
    assert len((tmp_path / "responses.jsonl").read_text().splitlines()) == 40
    assert (tmp_path / "responses.parquet").stat().st_size > 0
    table = capsys.readouterr().out
    assert table.startswith("| model    | Arithmetic ")
    assert (tmp_path / "results.md").read_text().startswith(table.split("\n")[0])


def test_curves_are_real_images(tmp_path: Path) -> None:
    evaluated(tmp_path, *SMALL, "--max-tokens", "20,44", "--k", "1,2,4")
    for name in ("pass_at_k", "pass_by_limit"):
        with Image.open(tmp_path / f"{name}.png") as image:
            image.load()
            assert min(image.size) > 300
            assert len(set(image.convert("L").tobytes())) > 10
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
    curves = json.loads((tmp_path / "curves.json").read_text())
    by_k = [point["value"] for point in curves["pass_at_k"]["lines"]["Arithmetic"].values()]
    by_limit = [point["value"] for point in curves["pass_by_limit"]["lines"]["Arithmetic"].values()]
    assert by_k == sorted(by_k)
    assert by_limit == sorted(by_limit)
    assert by_k[-1] == by_limit[-1]


def test_killed_and_resumed_gives_the_same_results(tmp_path: Path) -> None:
    arguments = [*SMALL, "--max-tokens", "44"]
    evaluated(tmp_path / "whole", *arguments)
    assert in_process(3, *arguments, "--out", tmp_path / "killed") == -signal.SIGKILL
    cut = (tmp_path / "killed" / "responses.jsonl").read_bytes()
    assert 0 < cut.count(b"\n") < 40
    assert not cut.endswith(b"\n")
    assert not (tmp_path / "killed" / "results.json").exists()
    evaluated(tmp_path / "killed", *arguments)
    for name in ("results.json", "results.md"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    kept, whole = (sorted((tmp_path / run / "responses.jsonl").read_text().split("\n")) for run in ("killed", "whole"))
    assert kept == whole


def test_the_hard_subset_of_a_base_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    evaluated(base, *SMALL, "--max-tokens", "44")
    right: Counter[str] = Counter()
    for line in (base / "responses.jsonl").read_text().splitlines():
        right[json.loads(line)["id"]] += json.loads(line)["right"]
    options = [*SMALL, "--max-tokens", "44", "--hard-subset-from", base]
    hard = evaluated(tmp_path / "hard", *options, "--seed", "1")
    asked = {json.loads(line)["id"] for line in (tmp_path / "hard" / "responses.jsonl").read_text().splitlines()}
    assert asked == {problem for problem, count in right.items() if count <= 1}
    assert 0 < hard["tasks"]["arithmetic"]["problems"] == len(asked) < 10
    assert "right at most 1 times" in hard["about"]["problems"]
    with pytest.raises(TaskError, match="look worse than it is; add --seed 1"):
        evaluated(tmp_path / "again", *options)
    with pytest.raises(TaskError, match="has no answers to aime24, only to arithmetic"):
        evaluated(tmp_path / "other", *options, "--seed", "1", "--tasks", "aime24", "--data", DATA)


def saved(path: Path) -> Path:
    """Four answers to each AIME problem, of which as many are right as the problem's place modulo 5 says."""
    rows = [json.loads(line) for line in (DATA / "eval_aime24.jsonl").read_text().splitlines()]
    with path.open("w") as file:
        for place, row in enumerate(rows):
            for sample in range(4):
                answer = row["answer"] if sample < place % 5 else "-1"
                text = f"Let me see. The answer is \\boxed{{{answer}}}."
                file.write(json.dumps({"problem": row["problem"], "completion": text, "tokens": 100}) + "\n")
    return path


def test_saved_responses_of_any_model(tmp_path: Path) -> None:
    file = saved(tmp_path / "elsewhere.jsonl")
    options = ["--responses", file, "--tasks", "aime24", "--data", DATA, "--judge", "boxed"]
    found = evaluated(tmp_path / "out", *options)
    task = found["tasks"]["aime24"]
    assert (found["model"], task["problems"], task["missing"], task["samples"]) == ("elsewhere", 30, 0, 4)
    assert task["pass@k"]["1"]["value"] == pytest.approx(0.5)
    assert task["pass@k"]["4"]["value"] == pytest.approx(24 / 30)
    assert task["majority"]["value"] == pytest.approx((6 * 0.5 + 12) / 30)  # 2 of 4 tie, 3 and 4 of 4 win
    assert task["reasons"] == {"match": 60, "different": 60}
    own = evaluated(tmp_path / "again", *options[:1], tmp_path / "out" / "responses.jsonl", *options[2:])
    assert own["tasks"] == found["tasks"]


@pytest.mark.parametrize(
    ("name", "title", "problems"), [("hmmt25", "HMMT25", 30), ("brumo25", "BRUMO25", 30), ("cmimc25", "CMIMC25", 40)]
)
def test_sets_of_2025_are_known_by_name_once_their_file_is_there(
    tmp_path: Path, name: str, title: str, problems: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In MathArena's own columns, which have no id."""
    rows = [
        {"problem_idx": i, "problem": f"Compute {i} + {i}.", "answer": str(2 * i), "problem_type": ["Algebra"]}
        for i in range(1, problems + 1)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"eval_{name}.parquet")
    answers = tmp_path / "answers.jsonl"
    right = [{"problem": row["problem"], "response": rf"\boxed{{{row['answer']}}}"} for row in rows[:10]]
    wrong = [{"problem": row["problem"], "response": r"\boxed{-1}"} for row in rows[10:]]
    answers.write_text("".join(json.dumps(row) + "\n" for row in right + wrong))
    asked = ["--responses", answers, "--tasks", name, "--data", tmp_path, "--samples", "1"]
    found = evaluated(tmp_path / "out", *asked)
    assert found["tasks"][name]["problems"] == problems
    assert found["tasks"][name]["pass@k"]["1"]["value"] == pytest.approx(10 / problems)
    assert f"| {title}" in capsys.readouterr().out
    parquet.write_table(pyarrow.Table.from_pylist(rows[1:]), tmp_path / f"eval_{name}.parquet")
    with pytest.raises(TaskError, match=f"{problems - 1} rows, but {name} has {problems}"):
        evaluated(tmp_path / "again", *asked)
    with pytest.raises(TaskError, match=f"holds no eval_{name}.*MathArena"):
        evaluated(tmp_path / "again", *asked[:4], "--data", tmp_path / "nowhere")


def test_the_maths_grader_sees_through_other_ways_to_write_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "ways.jsonl"
    answers = ["721", "\\frac{1442}{2}", "720 + 1", "722"]
    rows = [{"id": "aime24-1-00", "response": f"so \\boxed{{{answer}}}"} for answer in answers]
    rows.append({"id": "aime24-1-00", "response": "so \\boxed{721}", "finish_reason": "length"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluated(tmp_path / "out", "--responses", file, "--tasks", "aime24", "--data", DATA)
    judged = [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]
    assert [one["right"] for one in judged] == [True, True, True, False, False]
    assert judged[-1]["reason"] == "truncated"
    assert found["about"]["grader"].startswith("math, r3 ")


def test_a_set_that_was_answered_in_part_says_so(tmp_path: Path) -> None:
    file = saved(tmp_path / "part.jsonl")
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:40]))
    found = evaluated(tmp_path / "out", "--responses", file, "--tasks", "aime24", "--data", DATA, "--judge", "boxed")
    assert (found["tasks"]["aime24"]["problems"], found["tasks"]["aime24"]["missing"]) == (10, 20)
    assert "10 of 30" in (tmp_path / "out" / "results.md").read_text()


def test_lengths_are_needed_for_a_curve_over_limits(tmp_path: Path) -> None:
    file = tmp_path / "no_lengths.jsonl"
    file.write_text(json.dumps({"id": "aime24-1-00", "response": "\\boxed{721}"}) + "\n")
    options = ["--responses", file, "--tasks", "aime24", "--data", DATA, "--judge", "boxed", "--max-tokens", "5,50"]
    with pytest.raises(TaskError, match="add a column 'tokens'"):
        evaluated(tmp_path / "out", *options)
    evaluated(tmp_path / "counted", "embedded", *options)  # counted by the tokenizer of the model named
    lines = json.loads((tmp_path / "counted" / "curves.json").read_text())["pass_by_limit"]["lines"]["AIME24"]
    assert [point["value"] for point in lines.values()] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], TaskError, "needs a MODEL"),
        (["embedded", "--k", "32"], TaskError, "raise --samples"),
        (["embedded", "--tasks", "aime99"], TaskError, "no set 'aime99'; there are arithmetic, aime24"),
        (["embedded", "--tasks", "arithmetic", "--max-tokens", "99999"], ConfigError, "--max-tokens to at most"),
        (["embedded", "--tasks", "arithmetic", "--top-p", "0", "--max-tokens", "9"], ConfigError, "top_p must be"),
        (["/nowhere", "--tasks", "arithmetic"], ConfigError, "cannot load it"),
        (["--responses", "/nowhere.jsonl", "--tasks", "arithmetic"], TaskError, "no file /nowhere.jsonl"),
    ],
)
def test_bad_input_names_the_fix(tmp_path: Path, arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(arguments_of(*arguments, "--judge", "boxed", "--out", str(tmp_path)))


@pytest.mark.parametrize("arguments", [["m", "--samples", "0"], ["m", "--k", "1,x"], ["m", "--judge", "guess"]])
def test_bad_options_are_refused_by_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(*arguments)
    assert f"argument {arguments[1]}" in capsys.readouterr().err


# `r3 eval RUN_DIR`: what a run trained, on its own problems, under its own prompts and rewards, or as one asks.


LIMITS = ["--samples", "2", "--device", "cpu", "--temperature", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with checkpoints at the second and the last; a reward of one's own, a template with a column."""
    folder = tmp_path_factory.mktemp("trained")
    named = [f"{{function: tests.scripted.{name}, weight: 2}}" for name in ("graded", "brief")]
    rewards = [f"task.rewards=[{', '.join(named)}]", "task.outcome=graded", "task.right_above=0.3"]
    asked = "task.template='{id}: {question}'"
    settings = overrides(folder, train__epochs=2, run__keep_checkpoints=9)
    own = [setting for setting in settings if not setting.startswith("task.verifier")]
    assert main(["train", "--quiet", *own, *rewards, asked]) == 0
    assert RunFiles(folder / "run").checkpoints.steps() == [2, 4]
    return folder / "run"


def evaluated_run(folder: Path, *arguments: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert main(["eval", *map(str, arguments), *LIMITS, "--out", str(folder)]) == 0
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), rows


def test_its_own_task_prompts_and_rewards(trained: Path, tmp_path: Path) -> None:
    found, rows = evaluated_run(tmp_path, trained, "--temperature", "0")
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
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in ("4", "2"):
        assert main(["eval", str(trained), "--step", step, *LIMITS]) == 0
    assert {path.name for path in (tmp_path / "evals" / "run").iterdir()} == {
        "step-000002",
        "step-000004",
        "results.md",
    }
    table = (tmp_path / "evals" / "run" / "results.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["run step 2", "run step 4"]
    assert table[-1] in capsys.readouterr().out


def test_another_judge_template_and_set(trained: Path, tmp_path: Path) -> None:
    found, rows = evaluated_run(tmp_path / "never", trained, "--judge", "tests.scripted.never")
    assert not any(row["right"] for row in rows)
    assert found["about"]["grader"].startswith("tests.scripted.never, ")
    _, plain = evaluated_run(tmp_path / "plain", trained)
    found, other = evaluated_run(tmp_path / "other", trained, "--template", "{question} {answer}?")
    assert found["about"]["template"] == "{question} {answer}?"
    assert [row["response"] for row in plain] != [row["response"] for row in other]
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"id": "x", "asked": "1+1", "wanted": "100"}) + "\n")
    columns = ["--question-column", "asked", "--answer-column", "wanted"]
    judge = ["--judge", "tests.train.tiny.judge"]
    found, rows = evaluated_run(tmp_path / "mine", trained, "--tasks", mine, *columns, *judge)
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
    trained: Path, tmp_path: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(trained) if argument == "RUN" else argument for argument in arguments]
    assert main(["eval", *given, *LIMITS, "--out", str(tmp_path / "out")]) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
