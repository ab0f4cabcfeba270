"""What nobody should give `r3`, and somebody will: every case is a line that says what is wrong, and exit code 2."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3.cli import main
from tests.torture import inputs
from tests.train.tiny import overrides, save_model, save_task

BOUNDED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(BOUNDED, max_examples=30)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(a) for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.threads=99999999", "run.threads: Input should be less than or equal to 4096"),
        ("task.size=1e12", "task.size: Input should be less than or equal to"),
        ("task.difficulty=[99999999]", "task.difficulty.0: Input should be less than or equal to 1000"),
        ("run.dir=runs/{method:9999999999}", "only {method}, {task} and {seed} can be filled in"),
        ("run.dir=runs/{seed.__class__}", "only {method}, {task} and {seed} can be filled in"),
        (f"run.dir=runs/{'x' * 300}", "no name that a directory can have"),
        ("run.seed=99999999999999999999", "run.seed: beyond 9,007,199,254,740,992"),
        ("train.betas=[1.0, 0.9]", "train.betas.0: Input should be less than 1"),
        ("train.betas=[0.9, -0.1]", "train.betas.1: Input should be greater than or equal to 0"),
        ("train.epochs=99999999999", "train.epochs: Input should be less than or equal to"),
        ("train.steps=true", "train.steps: must be a number, not true or false"),
        ("method=[]", "method.name: Input should be"),
        ("rollout.temperature=.inf", "rollout.temperature: Input should be a finite number"),
        ("model.lora.alpha=.inf", "model.lora.alpha: Input should be a finite number"),
        ("train.learning_rate=.nan", "train.learning_rate: Input should be"),
        ('model.path="\\ud800"', "model.path: holds a zero byte or half a character"),
        ("train.steps=" + "9" * 4000, "train.steps: beyond"),
        ("train.steps=" + "9" * 5000, "is not valid YAML"),
        ("train.steps=" + "[" * 2000, "is not valid YAML: nested too deeply"),
        ("train.steps=2020-13-45", "is not valid YAML: month must be in 1..12"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "train", "--dry-run", setting)


def test_recipes_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for content, message in (
        (b"model:\n  path: caf\xe9\n", "not UTF-8 text"),
        (b"[" * 5000, "nested too deeply"),
        (bomb.encode(), "named parts"),
        (b"a: " + b"x" * 2_000_000, "a recipe has at most 1,000,000"),
        (b"train: {steps: 1:99:99}", "train"),
    ):
        recipe.write_bytes(content)
        assert message in refused(capsys, "train", recipe, "--print-config")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(capsys, "train", tmp_path / "pipe", "--print-config")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"problem": "  ", "answer": "1"}], "row 1: nothing in column 'problem'"),
        ([{"problem": "1?", "answer": " "}], "row 1: nothing in column 'answer'"),
        ([{"problem": ["1?"], "answer": "1"}], "row 1, column 'problem': a list, but not of messages"),
        ([{"problem": "1?", "answer": float("nan")}], "row 1: nan in column 'answer'"),
        ([{"problem": "1\ud800", "answer": "1"}], "half a character (a lone surrogate) in column 'problem'"),
        ([{"problem": "1?", "answer": "1\ud800"}], "half a character (a lone surrogate) in column 'answer'"),
        ([{"id": {}, "problem": "1?", "answer": "1"}], "row 1: a dict in column 'id'"),
        (
            [{"id": "a", "problem": "1?", "answer": "1"}, {"id": "b", "problem": "1?", "answer": "2"}],
            "row 2: the question of row 1 with another answer ('2', there '1')",
        ),
    ],
)
def test_a_bad_row_is_named(
    rows: list[dict[str, object]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert message in refused(capsys, "train", *overrides(tmp_path, task__path=path))
    assert not (tmp_path / "run").exists()


def test_broken_data_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = gzip.compress(save_task(tmp_path / "task.jsonl", problems=500).read_bytes())
    for name, content, message in (
        ("cut.jsonl.gz", whole[:200], "cannot be read"),
        ("none.jsonl.gz", b"not gzip", "cannot be read"),
        ("flipped.jsonl.gz", whole[:60] + b"\xff" * 40 + whole[100:], "cannot be read"),
        ("none.parquet", b"PAR1 no", "not a whole Parquet file"),
        ("number.json", b"5", "a int, not a list of rows"),
        ("deep.json", b"[" * 100_000, "not JSON"),
        ("latin.jsonl", b'{"problem": "caf\xe9"}', "line 1: not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        assert message in refused(capsys, "train", *overrides(tmp_path, task__path=tmp_path / name))
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "no file" in refused(capsys, "train", *overrides(tmp_path, task__path=tmp_path / "pipe.jsonl"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def judge(:\n", "importing it raised SyntaxError"),
        ("import sys\nsys.exit(3)\n", "importing it raised SystemExit"),
        ("1 / 0\n", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_judge_that_cannot_be_imported(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"r3_bad_judge_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused(capsys, "train", *overrides(tmp_path, task__verifier=f"{name}.judge"))
    assert not (tmp_path / "run").exists()


def test_a_judge_that_exits_stops_the_run_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r3_exiting_judge.py").write_text("import sys\ndef judge(completion, **_): sys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(capsys, "train", "--quiet", *overrides(tmp_path, task__verifier="r3_exiting_judge.judge"))
    assert "raised SystemExit" in line


def test_a_heldout_prompt_longer_than_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"id": "h", "problem": "1 + 1? " * 60, "answer": "2"}) + "\n")
    line = refused(capsys, "train", *overrides(tmp_path, task__heldout_path=tmp_path / "heldout.jsonl"))
    assert "the prompt of query 'h'" in line


def test_lora_targets_that_match_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_ = overrides(tmp_path, model__lora__enabled="true", model__lora__targets="[nothing]")
    assert "model.lora.targets=['nothing']" in refused(capsys, "train", *settings_)
    assert not (tmp_path / "run").exists()


def test_latin_1_for_the_verifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases.jsonl").write_bytes('{"id": 1, "prediction": "caf\xe9", "gold": "1"}\n'.encode("latin-1"))
    assert "not UTF-8 text" in refused(capsys, "verify", tmp_path / "cases.jsonl")


def test_a_bug_of_ours_is_a_line_with_the_path_of_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import r3.config

    def bug(*_: object) -> None:
        raise KeyError("a\nbug")

    monkeypatch.setattr(r3.config, "load_config", bug)
    assert main(["train", "--dry-run"]) == 1
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert lines[0].startswith("r3: unexpected KeyError: ")
    file = Path(lines[0].split("the traceback is in ")[1].split(",")[0])
    assert "in bug" in file.read_text()
    file.unlink()


# Each of these is tried at greater length by `make torture`.


@BOUNDED
@given(st.lists(inputs.one_override(), min_size=1, max_size=3))
def test_any_setting(given_: list[str]) -> None:
    assert inputs.settings_fault(given_) is None


@FEW
@given(st.lists(inputs.one_override(), min_size=1, max_size=2))
def test_any_setting_in_a_dry_run(given_: list[str]) -> None:
    assert inputs.dry_fault(given_) is None


@BOUNDED
@given(inputs.recipes())
def test_any_recipe(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assert inputs.recipe_fault(tmp_path_factory.getbasetemp(), content) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    save_model(made / "model")
    return made


@FEW
@given(inputs.data_rows())
def test_any_rows(folder: Path, rows: list[object]) -> None:
    assert inputs.rows_fault(folder, rows) is None


def test_any_damage_to_a_data_file(folder: Path) -> None:
    chance = random.Random(1)
    for _ in range(20):
        assert inputs.damaged_file_fault(folder, chance) is None
