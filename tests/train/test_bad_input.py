"""Bad input: one clear line, a non-zero exit, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from r3.cli import main
from tests.tokenizing import char_tokenizer
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3, save_model


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """The one line a command line is refused with."""
    assert main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().split("\n")
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("r3: ")
    return lines[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.repaly=off", "method.repaly: no such setting; did you mean method.replay?"),
        ("learning_rate=1e-5", "learning_rate: no such setting; did you mean train.learning_rate?"),
        ("train.learning_rate=fast", "train.learning_rate: Input should be a valid number"),
        ("rollout.group_size=1", "rollout.group_size: Input should be greater than or equal to 2"),
        ("method=ppo", "method.name: Input should be 'grpo', 'dapo'"),
        ("method.ranking.max_reward=1.5", "method.ranking.max_reward: Input should be less than 1"),
        ("seed", "an override is written key=value"),
        ("run.dir=runs/{model}", "only {method}, {task} and {seed} can be filled in"),
        ("model.path=/no/such/model", "model.path=/no/such/model: cannot load it"),
        ("task.path=/no/such/file.jsonl", "no file /no/such/file.jsonl; give the path"),
        ("task.question_column=question", "row 1: nothing in column 'question'"),
        ("task.heldout=12", "nothing is left to train on; lower task.heldout"),
        ("task.verifier=tests.nothing.judge", "task.verifier=tests.nothing.judge: cannot import it"),
        ("rollout.max_tokens=250", "the model's context is 256"),
        (
            "evaluate.max_tokens=250",
            "evaluate.max_tokens=250 asks for as many more, but the model's context is 256; lower",
        ),
        ("evaluate.max_tokens=0", "evaluate.max_tokens: Input should be greater than or equal to 1"),
        ("method.reflection.max_prompt_tokens=250", "method.reflection.max_prompt_tokens=250"),
        ("task.chat=true", "its tokenizer has no chat template"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert message in refused(capsys, "train", *overrides(tmp_path), setting)
    assert not (tmp_path / "run").exists()


def test_all_problems_are_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *overrides(tmp_path), "train.epochs=0", "rollout.max_tokens=0"]) == 2
    assert capsys.readouterr().err.count("r3: ") == 2


def test_an_empty_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.jsonl").write_text("\n")
    assert "holds no problems" in refused(capsys, "train", *overrides(tmp_path))


def test_bad_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.jsonl").write_text('{"id": "a", "problem": "1", "answer": "2"}\n{"id": "b", "prob')
    assert "task.jsonl, line 2: not JSON" in refused(capsys, "train", *overrides(tmp_path))
    (tmp_path / "task.jsonl").write_text('{"id": "a", "problem": "1", "answer": "2"}\n' * 2)
    assert "id 'a' appears twice" in refused(capsys, "train", *overrides(tmp_path))


def test_heldout_problems_in_the_training_data_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overrides(tmp_path, task__heldout_path=tmp_path / "task.jsonl")
    assert "held-out problems are also in the training data" in refused(capsys, "train", *settings)


def test_a_model_without_an_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        kept = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("eos_token")}
        path.write_text(json.dumps(kept))
    assert "names an end-of-text token" in refused(capsys, "train", *overrides(tmp_path))


def test_a_recipe_that_is_not_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read recipe" in refused(capsys, "train", tmp_path / "none.yaml")
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("model: [1, 2")
    assert "is not valid YAML" in refused(capsys, "train", recipe)
    recipe.write_text("- model\n")
    assert "must hold a mapping" in refused(capsys, "train", recipe)


def test_an_existing_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overrides(tmp_path, train__steps=2)
    assert main(["train", "--quiet", *settings]) == 0
    before = read_metrics(tmp_path / "run")
    capsys.readouterr()
    assert "already holds a run; resume it with r3 train --resume" in refused(capsys, "train", *settings, code=1)
    assert read_metrics(tmp_path / "run") == before


def test_resume_refuses_other_settings_and_other_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=2)]) == 0
    capsys.readouterr()
    run = tmp_path / "run"
    message = refused(capsys, "train", "--resume", run, "method=grpo", "rollout.group_size=8")
    assert "was made with other settings" in message
    assert "rollout.group_size" in message
    assert "run.seed" in refused(capsys, "train", "--resume", run, "run.seed=5")
    assert "not a run directory" in refused(capsys, "train", "--resume", tmp_path, code=1)


def test_a_metrics_file_cut_in_half_is_refused_or_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=4)]) == 0
    capsys.readouterr()
    run = tmp_path / "run"
    whole = (run / "metrics.jsonl").read_bytes()
    shutil.copytree(run, tmp_path / "copy")
    (run / "metrics.jsonl").write_bytes(whole[: len(whole) // 2])
    message = refused(capsys, "train", "--resume", run, "train.steps=6", code=1)
    assert "before the checkpoint of step 4: lines are missing" in message
    # Restored, it goes on.
    (run / "metrics.jsonl").write_bytes(whole)
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=6"]) == 0
    # A line that was being written when the power went is no loss: its step is done again.
    (tmp_path / "copy" / "metrics.jsonl").write_bytes(whole + b'{"step": 5, "accu')
    assert main(["train", "--quiet", "--resume", str(tmp_path / "copy"), "train.steps=6"]) == 0
    assert read_metrics(tmp_path / "copy") == read_metrics(run)


def test_a_run_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(
        command("train", "--quiet", *overrides(tmp_path, train__epochs=1000)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("step 1/") for line in process.stdout)
        message = refused(capsys, "train", "--resume", tmp_path / "run", code=1)
        assert f"in use by process {process.pid}" in message
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], check=True)
    try:
        settings = overrides(tmp_path, run__dir=disk / "run", train__epochs=50, run__keep_checkpoints=1)
        done = run_r3("train", "--quiet", *settings, check=False)
        assert done.returncode == 1
        message = done.stderr.strip().split("\n")[-1]
        assert message.startswith("r3: ")
        assert "free" in message
        assert "Traceback" not in done.stderr
        subprocess.run(["mount", "-o", "remount,size=100M", disk], check=True)
        reached = read_metrics(disk / "run")[-1]["step"]
        done = run_r3("train", "--quiet", "--resume", disk / "run", f"train.steps={reached + 2}")
        assert read_metrics(disk / "run")[-1]["step"] == reached + 2
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_tokenizer_with_a_template_takes_chats(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    tokenizer = char_tokenizer()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    assert tokenizer.chat_template is None
    settings = overrides(tmp_path, task__chat="true", train__steps=1)
    assert main(["train", "--quiet", *settings]) == 0
