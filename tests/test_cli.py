"""The `r3` command as a person meets it, and what nobody should give it and somebody will.

Covers r3.commands.buffer, r3.commands.completion, r3.commands.doctor.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from r3 import SampleBuffer, __version__
from r3.cli import main
from r3.commands.eval_tasks import ALL_TASKS, EMBEDDED_TASK
from r3.config import validate
from r3.tasks.datasets import SETS
from tests.method.makers import make_sample
from tests.train.tiny import overrides, save_task

RECIPES = Path(__file__).parents[1] / "recipes"


def test_help_names_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("train", "buffer", "view", "show", "--resume", "exit codes"))


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "r3", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"r3 {__version__}\n"


def test_print_config_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-config", "method=grpo"]) == 0
    assert validate(yaml.safe_load(capsys.readouterr().out)).method.name == "grpo"


@pytest.mark.parametrize("name", ["deepscaler-1.5b", "deepscaler-7b"])
def test_the_papers_recipes_pass_a_dry_run(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"problem": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(1000)))
    assert main(["train", str(RECIPES / f"{name}.yaml"), "--dry-run", f"task.path={data}"]) == 0
    text = capsys.readouterr().out
    assert {"deepscaler-1.5b": "1.78 B parameters", "deepscaler-7b": "7.62 B parameters"}[name] in text
    assert "744 queries, 3 epochs, 18 steps" in text  # 1,000 problems, 256 of them held out, 128 per step
    assert "128 queries × 8 samples = 1,024 responses per step, at most 8,388,608 tokens" in text
    assert "dry run passed" in text


def test_a_dry_run_says_what_sharding_saves(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["train", str(RECIPES / "deepscaler-7b.yaml"), "--dry-run", "--processes", "8", "model.lora.enabled=false"]
    assert main([*recipe, "train.shard=true"]) == 0
    text = capsys.readouterr().out
    assert "11.42 GB  optimiser (float32 masters and two moments), split over 8 processes" in text  # 7.62 B × 12 / 8
    assert "at most at once in each of 8 processes" in text
    assert main([*recipe, "train.shard=false"]) == 0
    assert "91.39 GB  optimiser" in capsys.readouterr().out
    assert main([*recipe, "train.shard=true", "model.lora.enabled=true"]) == 2
    assert "set one of them to false" in capsys.readouterr().err


def test_processes_are_started_by_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--processes", "8"], ["--dry-run", "--processes", "0"]):
        assert main(["train", *arguments]) == 2
        assert "torchrun --nproc-per-node N" in capsys.readouterr().err


def test_a_dry_run_refuses_what_training_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "rollout.max_tokens=100000"]) == 2
    assert "the model's context is" in capsys.readouterr().err


def test_buffer_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add([make_sample(i % 3 == 0, tokens=[i, i + 1], step=1) for i in range(9)])
    assert main(["buffer", "stats", str(path)]) == 0
    assert "9" in capsys.readouterr().out
    assert main(["buffer", "check", str(path)]) == 0
    exported, copy = tmp_path / "out.jsonl", tmp_path / "copy.sqlite"
    assert main(["buffer", "export", str(path), str(exported)]) == 0
    assert main(["buffer", "import", str(exported), str(copy)]) == 0
    capsys.readouterr()
    assert main(["buffer", "import", str(exported), str(copy)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["buffer", "stats", str(tmp_path)]) == 0  # a run directory will do
    with SampleBuffer.open_reader(copy) as other:
        assert other.stats().samples == 9
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 :] = b"\xff" * (len(damaged) - len(damaged) // 2)
    path.write_bytes(damaged)
    capsys.readouterr()
    assert main(["buffer", "check", str(path)]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert main(["buffer", "salvage", str(path), str(tmp_path / "saved.sqlite")]) in (0, 1)
    assert "Salvaged(" not in capsys.readouterr().out
    assert main(["buffer", "stats", str(tmp_path / "none.sqlite")]) == 1
    assert capsys.readouterr().err.startswith("r3: ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tra"], {"train"}),
        (["train", "--dry"], {"--dry-run"}),
        (["train", "method.replay.k"], {"method.replay.k="}),
        (["models", "f"], {"fetch"}),
        (["recipes", "c"], {"copy"}),
        (["view", "--exp"], {"--export"}),
        (["train", "task.caged=t"], set()),
    ],
)
def test_bash_completes_commands_options_and_settings(typed: list[str], offered: set[str]) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "r3", "completion", "bash"], capture_output=True, text=True, check=True
    )
    words = " ".join(f"'{word}'" for word in ["r3", *typed])
    ask = f"\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _r3; printf '%s\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script.stdout + ask], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tra", {"train"}),
        ("train --dry", {"--dry-run"}),
        ("train method.replay.k", {"method.replay.k="}),
        ("models f", {"fetch"}),
        ("view --exp", {"--export"}),
    ],
)
def test_fish_completes_commands_options_and_settings(typed: str, offered: set[str], tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "r3", "completion", "fish"], capture_output=True, text=True, check=True
    )
    (tmp_path / "r3.fish").write_text(script.stdout)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {tmp_path}/r3.fish; complete -C 'r3 {typed}'"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert set(done.stdout.split()) == offered


def test_every_set_that_eval_knows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(ALL_TASKS) == {EMBEDDED_TASK, *SETS}
    assert main(["eval", "embedded", "--tasks", "arithmetics"]) == 2
    said = capsys.readouterr().err
    assert all(f" {name}," in said for name in ALL_TASKS)
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ALL_TASKS)


def test_a_text_that_yaml_reads_as_a_mapping_is_told_how_to_quote(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "task.name=file", "task.path=rows.jsonl", "task.template=Q: {question}"]) == 2
    assert "task.template: a text is needed; one with a colon and a space in it goes into quotes" in (
        capsys.readouterr().err
    )


def test_the_doctor_tells_versions_devices_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("R3_DATA", str(tmp_path))
    (tmp_path / "train_gsm8k.jsonl").write_text("")
    assert main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["r3"] == __version__
    assert {"python", "torch", "transformers", "engines", "processors"} <= lines.keys()
    assert lines["verifier"] == "works (match)"
    assert lines["vllm"].startswith("not installed (pip install") or lines["vllm"][0].isdigit()
    assert "gsm8k" in lines["data"]


# What nobody should give `r3`, and somebody will: every case is a line that says what is wrong, and exit code 2.


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
        ('run.dir="\\ud800"', "run.dir: holds a zero byte or half a character"),
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
