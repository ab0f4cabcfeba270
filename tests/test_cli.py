"""The `r3` command as a person meets it.

Covers r3.commands.completion, r3.commands.doctor, r3.commands.buffer.
"""

from __future__ import annotations

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
