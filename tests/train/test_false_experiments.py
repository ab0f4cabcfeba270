"""What runs is what was asked for: a setting that would not act, or would act on something else, is refused or said.

More of the kind, in files of their own: a method named over a printed config (tests/test_config.py), adapters
(test_adapters.py), questions that come twice (test_repeats.py), and in TRL (tests/integrations/).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import r3
from r3.cli import main
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, read_metrics, run_r3


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


JUDGE = "tests.train.tiny.judge"
BRIEF = "tests.evaluate.test_eval_run.brief"


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
    run_r3("train", "--quiet", recipe, *given)
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


def test_an_evaluation_is_not_taken_for_that_of_another_model(tmp_path: Path) -> None:
    """Trained again under the same name, with the answers of the first run's model still there."""
    asked = ["--samples", "1", "--device", "cpu", "--out", tmp_path / "eval"]
    run_r3("train", "--quiet", *overrides(tmp_path, train__steps=2))
    run_r3("eval", tmp_path / "run", *asked)
    run_r3("eval", tmp_path / "run", *asked)  # the same one goes on
    (tmp_path / "run").rename(tmp_path / "first")
    run_r3("train", "--quiet", *overrides(tmp_path, train__steps=2, run__seed=7))
    done = run_r3("eval", tmp_path / "run", *asked, check=False)
    assert done.returncode == 2
    assert "holds an evaluation made otherwise (weights " in done.stderr


def test_an_evaluation_has_the_limit_of_the_runs_own(tmp_path: Path) -> None:
    settings = overrides(tmp_path, train__steps=1, evaluate__max_tokens=40, rollout__max_tokens=3)
    run_r3("train", "--quiet", *settings)
    last = read_metrics(tmp_path / "run")[-1]
    again = r3.Run(tmp_path / "run").evaluate()
    assert (again["accuracy"], again["truncated"]) == (last["heldout/accuracy"], last["heldout/truncated"])
    run_r3("eval", tmp_path / "run", "--samples", "1", "--device", "cpu", "--out", tmp_path / "eval")
    assert json.loads((tmp_path / "eval" / "about.json").read_text())["max_tokens"] == 40
