"""Bad input: one clear line, a non-zero exit, nothing half-written; and what runs is what was asked for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import r3
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
        ("task.verifier=maths", "neither math nor boxed, nor the dotted path of a function"),
        ("task.question_column=question", "task.question_column, task.answer_column"),
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
        assert main(["train", "--quiet", "--resume", str(disk / "run"), f"train.steps={reached + 2}"]) == 0
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


# What runs is what was asked for: a setting that would not act, or would act on something else, is refused or said.
# More of the kind in other files: a method named over a printed config (tests/test_config.py), adapters
# (tests/policy/test_adapters.py), and in TRL (tests/integrations/test_trl_settings.py).


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


JUDGE = "tests.train.tiny.judge"
BRIEF = "tests.scripted.brief"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # tests.train.tiny.judge is the task's verifier throughout; nobody would ask it
        ([f"task.rewards={BRIEF}"], "task: verifier=tests.train.tiny.judge would not be asked"),
        ([f"task.rewards={BRIEF}", "task.verifier=boxed"], "verifier=boxed would not be asked"),
        (["task.verifier=math", "task.caged=true"], "caged=true is for a function of your own in task.verifier"),
        ([f"task.rewards={BRIEF}", "task.verifier=math", "task.caged=true"], "set caged: true for each of them"),
        (["task.rewards=correct", "task.right_above=0.9"], "right_above=0.9 is for an outcome that is a score"),
        (["model.lora.rank=4"], "model.lora: rank given, and the whole model would be trained"),
        (["task.template='Answer as a clerk.'"], "task.template has no {question}, so nothing would be asked"),
        (["task.template='Answer {{question}}'"], "task.template has no {question}"),
        (["train={steps: 1, steps: 2}"], "steps is there twice, in line 1"),
    ],
)
def test_what_would_not_act_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], told: str
) -> None:
    assert told in refused(capsys, "train", *overrides(tmp_path), *settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [["model.lora=on"], ["model.lora.enabled=false"], ["model.lora=off"]])
def test_a_rank_goes_with_adapters_on_or_off(tmp_path: Path, settings: list[str]) -> None:
    rank = ["model.lora.rank=3", "train.steps=1", "train.epochs=1"]
    assert main(["train", "--quiet", *overrides(tmp_path), *settings, *rank]) == 0
    (policy,) = (tmp_path / "run" / "checkpoints").glob("*/policy")
    adapters = policy / "adapter_config.json"
    assert adapters.exists() == (settings == ["model.lora=on"])
    assert not adapters.exists() or json.loads(adapters.read_text())["r"] == 3
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config))  # rank and all: a whole config is no mistake
    assert main(["train", "--dry-run", str(tmp_path / "again.yaml"), f"run.dir={tmp_path / 'again'}"]) == 0


def test_a_printed_change_of_adapters_that_are_off_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "model.lora.enabled=false", "model.lora.rank=3", "--print-config", "--changed"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert main(["train", str(tmp_path / "again.yaml"), "--print-config", "--changed"]) == 0
    assert capsys.readouterr().out == printed


def test_a_section_that_stands_twice_in_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {learning_rate: 1.0e-4}\nmethod: grpo\ntrain:\n  steps: 3\n")
    assert "mine.yaml: train is there twice, in lines 1 and 3" in refused(capsys, "train", recipe)
    recipe.write_text("a: &a {steps: 3}\ntrain:\n  <<: *a\n  steps: 4\n")  # what is merged may be said otherwise
    assert "a: no such setting" in refused(capsys, "train", recipe)


def test_another_task_starts_from_the_general_defaults_however_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for named in ("task=code-tiny", "task.name=code-tiny"):
        assert main(["train", named, "--print-config"]) == 0
        printed.append(yaml.safe_load(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert printed[0]["train"]["learning_rate"] == 1e-6  # that of the embedded recipe suits its model alone


CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
PLAIN = {"problem": "What is 1 + 1?", "answer": "30"}


@pytest.mark.parametrize(
    ("row", "settings", "told"),
    [
        (
            {"problem": str(CHAT), "answer": "2"},
            [],
            "row 1: column 'problem' holds a chat that was written out",
        ),
        ({"problem": json.dumps(CHAT), "answer": "2"}, [], "holds a chat that was written out as text"),
        (
            {"question": "What is 1 + 1?", "problem": "algebra", "answer": "2"},
            ["task.question_column=question"],
            "row 1: column 'problem' is not the question, which is in 'question'",
        ),
        (
            {**PLAIN, "choices": ["1", "2"]},
            ["task.template='{question} {choices}'"],
            "task.template asks for {choices}, and that column holds a list here; write it as text",
        ),
        (
            {**PLAIN, "level": None},
            ["task.template='{level}: {question}'"],
            "task.template asks for {level}, and that column holds nothing here",
        ),
    ],
)
def test_what_would_be_asked_as_pythons_spelling_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], settings: list[str], told: str
) -> None:
    path = rows(tmp_path / "rows.jsonl", *({**row, "id": f"q{i}"} for i in range(6)))
    assert told in refused(capsys, "train", *overrides(tmp_path, task__path=path), *settings)


def test_a_list_that_is_no_chat_is_a_question(tmp_path: Path) -> None:
    asked = "[{'role' of x}, {1}]: which one is longer?"
    path = rows(tmp_path / "rows.jsonl", *({"problem": f"{asked} {i}", "answer": "60"} for i in range(8)))
    assert main(["train", "--dry-run", *overrides(tmp_path, task__path=path)]) == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["train.steps=2"],
            "method=r3-paper: this run asks 8 of 8 queries, each once, and replay and reflection go",
        ),
        (["train.epochs=1"], "method=r3-paper: this run asks 8 of 8 queries, each once"),
        (
            ["train.epochs=1", "method=r3-no-reflection"],
            "method=r3-no-reflection: this run asks 8 of 8 queries, each once, and replay goes",
        ),
        (["method.reflection.from_epoch=4"], "method.reflection.from_epoch=4: this run ends before that pass"),
        (["task.heldout=7"], "task.heldout=7 keeps more problems apart than are left: the run trains on 5 of 12"),
        (["method=grpo", "method.replay.k=8"], "method.replay.k has no effect: method.replay is off (method=grpo)"),
        (["train.epochs=1", "method=grpo"], ""),
        (["train.epochs=1", "method=exgrpo"], ""),
        (["train.epochs=2", "task.heldout=6"], ""),
    ],
)
def test_what_would_never_act_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: list[str], told: str
) -> None:
    given = [text for text in overrides(tmp_path) if not text.startswith(("method.", "reward."))]
    small = ["method.reflection.max_prompt_tokens=200"] if not any("method=" in text for text in settings) else []
    assert main(["train", "--dry-run", *given, *small, *settings]) == 0
    said = [record.message for record in caplog.records if "no effect" in record.message or "run" in record.message]
    assert len(said) == bool(told)
    assert not told or said[0].startswith(told)


def test_a_reward_that_was_edited_does_not_go_on_as_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "edited_reward_of_a_test.py"
    module.write_text("def odd(completion):\n    return float(len(completion) % 2)\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("task: {rewards: edited_reward_of_a_test.odd}\n")
    given = [text for text in overrides(tmp_path, train__steps=2) if not text.startswith("task.verifier")]
    assert main(["train", "--quiet", str(recipe), *given]) == 0
    more = ["train", "--quiet", "--resume", tmp_path / "run", "train.steps=3"]
    module.write_text("def odd(completion):\n    return float(len(completion) % 3 == 0)\n")
    before = read_metrics(tmp_path / "run")
    done = run_r3(*more, check=False)
    assert done.returncode == 1
    assert "the source of edited_reward_of_a_test.odd changed since the run began" in done.stderr
    assert read_metrics(tmp_path / "run") == before
    run_r3(*more, "--allow-changed-data")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    (noted,) = json.loads((tmp_path / "run" / "run.json").read_text())["resumes"]
    assert "functions" in noted["changed_inputs"]


def test_an_evaluation_is_not_taken_for_that_of_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained again under the same name, with the answers of the first run's model still there."""
    evaluate = ["eval", str(tmp_path / "run"), "--samples", "1", "--device", "cpu", "--out", str(tmp_path / "eval")]
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=2)]) == 0
    assert main(evaluate) == 0
    assert main(evaluate) == 0  # the same one goes on
    (tmp_path / "run").rename(tmp_path / "first")
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=2, run__seed=7)]) == 0
    assert main(evaluate) == 2
    assert "holds an evaluation made otherwise (weights " in capsys.readouterr().err


def test_an_evaluation_has_the_limit_of_the_runs_own(tmp_path: Path) -> None:
    settings = overrides(tmp_path, train__steps=1, evaluate__max_tokens=40, rollout__max_tokens=3)
    assert main(["train", "--quiet", *settings]) == 0
    last = read_metrics(tmp_path / "run")[-1]
    again = r3.Run(tmp_path / "run").evaluate()
    assert (again["accuracy"], again["truncated"]) == (last["heldout/accuracy"], last["heldout/truncated"])
    evaluate = ["eval", str(tmp_path / "run"), "--samples", "1", "--device", "cpu", "--out", str(tmp_path / "eval")]
    assert main(evaluate) == 0
    assert json.loads((tmp_path / "eval" / "about.json").read_text())["max_tokens"] == 40
