"""Rewards of the user's own through `r3 train`, and answers that are programs, judged by running them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.config import load_config
from r3.run import RunFiles
from r3.tasks import load_task
from tests.tokenizing import char_tokenizer
from tests.train.tiny import ROOT, overrides, read_metrics

RECIPE = """\
task:
  rewards:
    - {{function: {module}.even, name: right}}
    - {{function: {module}.brief, weight: 0.5, truncated: judge}}
    - {{function: {module}.polite}}
  outcome: right
"""
FUNCTIONS = """\
import asyncio

def even(completions, answer, **columns):
    return [float(bool(text) and ord(text[0]) * 7919 % 100 < float(share)) for text, share in zip(completions, answer)]

def brief(completion):
    return 1 / (1 + len(completion))

async def polite(completion):
    await asyncio.sleep(0)
    return None if "a" in completion else 0.25
"""


def begun(folder: Path, *settings: str, module: str = "own_rewards_of_a_test") -> list[str]:
    """A recipe with three rewards whose functions lie beside it; the arguments of `r3 train`.

    A process imports a module's name once: tests that train in this one need a name each.
    """
    (folder / "recipes").mkdir()
    (folder / "recipes" / f"{module}.py").write_text(FUNCTIONS)
    (folder / "recipes" / "own.yaml").write_text(RECIPE.format(module=module))
    plain = [setting for setting in overrides(folder) if not setting.startswith(("task.verifier", "reward."))]
    return ["train", "--quiet", str(folder / "recipes" / "own.yaml"), *plain, "train.epochs=2", *settings]


def in_another_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`r3 …` as its script is started: without the current folder on Python's path."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from r3.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_every_reward_is_logged_weighted_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(begun(tmp_path, module="own_rewards_logged")) == 0
    capsys.readouterr()
    lines = read_metrics(tmp_path / "run")[1:]
    assert all({"reward/brief", "reward/polite"} <= line.keys() for line in lines)
    evaluated = [line for line in read_metrics(tmp_path / "run") if "heldout/accuracy" in line]
    assert evaluated
    for line in evaluated:  # `right` gives 1 for a right answer, and nothing for one that was cut
        assert line.get("heldout/reward/right", 0.0) == pytest.approx(line["heldout/accuracy"])
        assert 0 < line["heldout/reward/brief"] <= 0.5
    assert not any("reward/correct" in line or "reward/length" in line for line in lines)  # not the method's own reward
    run = RunFiles(tmp_path / "run")
    with SampleBuffer.open_reader(run.buffer_path) as buffer:
        history = buffer.history([f"q{i}" for i in range(8)], limit=100)
    samples = [sample for found in history.values() for sample in found]
    assert samples
    tokenizer = char_tokenizer()
    for sample in samples:
        text = tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        parts = dict(sample.reward_parts)
        parts.pop("ranking", None)
        assert parts["brief"] == pytest.approx(0.5 / (1 + len(text)))
        if sample.truncated:  # only `brief` asked for cut answers
            assert (sample.outcome, parts.keys()) == (False, {"brief"})
        else:
            assert parts["right"] == float(bool(sample.outcome))
            assert parts.get("polite") == (None if "a" in text else 0.25)
    assert any(sample.outcome for sample in samples)
    assert {sample.truncated for sample in samples} == {True, False}
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "held-out reward/brief" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "--group", f"1/{samples[0].query_id}"]) == 0
    shown = capsys.readouterr().out
    assert "brief " in shown
    assert "Reference answer: " in shown


def test_a_run_is_resumed_from_another_folder(tmp_path: Path) -> None:
    whole, parts, elsewhere = tmp_path / "whole", tmp_path / "parts", tmp_path / "elsewhere"
    for folder in (whole, parts, elsewhere):
        folder.mkdir()
    assert main(begun(whole, module="own_rewards_of_the_whole")) == 0
    assert in_another_process(parts, *begun(parts, "train.steps=2")).returncode == 0
    done = in_another_process(
        elsewhere, "train", "--quiet", "--resume", os.path.relpath(parts / "run", elsewhere), "train.steps=null"
    )
    assert done.returncode == 0, done.stderr

    def without_evaluation(run: Path) -> list[dict[str, Any]]:  # the first part evaluated at its own end, too
        return [{k: v for k, v in line.items() if not k.startswith("heldout")} for line in read_metrics(run)]

    assert without_evaluation(parts / "run") == without_evaluation(whole / "run")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "task.outcome=null",
            "task: outcome is needed with several rewards: name the one that says right or wrong (right",
        ),
        ("task.outcome=wrong", "task: outcome='wrong' is none of the rewards (right, brief, polite)"),
        ("task.rewards=[no.such.function]", "no.such.function: cannot import it (No module named 'no')"),
        ("task.rewards=[own_rewards_again.nobody]", "write package.module.function"),
        ("task.rewards=[guess]", "no built-in reward 'guess'; there are correct, boxed, think"),
        ("task.rewards=[own_rewards_again.even, own_rewards_again.even]", "two rewards are called 'even'"),
        ("task.rewards=[{function: own_rewards_again.even, name: length}]", "'length' is taken by another part"),
        ("task.rewards=[{function: boxed, weight: -1}] method=maxrl", "task.rewards takes from it (boxed)"),
        ("task.rewards=[]", "outcome and right_above are for task.rewards"),
    ],
)
def test_what_is_no_reward_is_one_line_and_leaves_nothing(
    tmp_path: Path, setting: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = begun(tmp_path, module="own_rewards_again")
    if "[" in setting and setting != "task.rewards=[]":
        arguments.append("task.outcome=null")
    assert main([*arguments, *re.split(r" (?=method=)", setting)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_function_that_raises_ends_the_run_by_name_or_counts_0_in_the_cage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "own_rewards_that_raise"
    arguments = begun(tmp_path, module=module)
    (tmp_path / "recipes" / f"{module}.py").write_text(FUNCTIONS.replace("return 1 /", "return 1 / 0 *"))
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert f"r3: {module}.brief raised ZeroDivisionError (division by zero) on query 'q" in told
    assert "mend it, or set caged: true for it in task.rewards" in told
    recipe = tmp_path / "recipes" / "own.yaml"
    recipe.write_text(recipe.read_text().replace("weight: 0.5", "weight: 0.5, caged: true"))
    done = in_another_process(tmp_path, *arguments, f"run.dir={tmp_path / 'caged'}")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "caged")[1:]
    assert all(line["reward/brief"] == 0 and line["reward/brief/failed"] >= 16 for line in lines)


def test_a_negative_reward_under_maxrl_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fines_of_a_test.py").write_text("def fine(completion):\n    return -0.25\n")
    named = "task.rewards=[boxed, {function: fines_of_a_test.fine, truncated: judge}]"
    plain = [text for text in overrides(tmp_path) if not text.startswith(("reward.", "method", "task.verifier"))]
    done = in_another_process(tmp_path, "train", *plain, named, "task.outcome=boxed", "method=maxrl")
    assert done.returncode == 2, done.stderr
    assert "method.advantage.scale=mean (maxrl) divides by a group's mean reward" in done.stderr
    assert re.search(r"query 'q\d+' got -0\.25 \(fine gave -0\.25\): let fine give 0 or more", done.stderr)
    assert "Traceback" not in done.stderr


def test_rows_need_no_reference_answer_where_own_rewards_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"q{i}", "problem": f"What is {i} + {i}?"} for i in range(12)]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [setting for setting in overrides(tmp_path) if not setting.startswith("task.verifier")]
    only = "task.rewards=tests.train.test_rewards.lucky"
    assert main(["train", "--quiet", *given, "train.steps=1", only]) == 0
    assert main(["train", "--quiet", *given, f"run.dir={tmp_path / 'other'}"]) == 2
    assert "nothing in column 'answer'" in capsys.readouterr().err


def lucky(completion: str) -> float:
    return float(len(completion) % 2)


def test_an_outcome_that_is_never_right_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A score whose best value stays below the threshold, as where format is named for correctness."""
    arguments = begun(tmp_path, "task.outcome=brief", "task.right_above=1.5", "train.epochs=7", "train.steps=14")
    assert main(arguments) == 0
    told = [record.getMessage() for record in caplog.records if "was right" in record.getMessage()]
    assert len(told) == 1
    assert re.match(
        r"step 10: none of \d+ answers in 10 batches was right.*'brief' gave .*task\.right_above=1\.5", told[0]
    )
    caplog.clear()
    (tmp_path / "fine").mkdir()
    assert main([*begun(tmp_path / "fine", "train.epochs=7", "train.steps=12")]) == 0
    assert not [record for record in caplog.records if "was right" in record.getMessage()]


# Training on code for real: a tiny model that writes programs learns what they should do by running them.


RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ["train.steps=10", "evaluate.samples=4", "run.rollouts_every=1"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after its lesson, by the commands of the recipe."""
    folder = tmp_path_factory.mktemp("code")
    made, lesson = folder / "made", folder / "lesson"
    assert main(["models", "make", "tiny", "--to", str(made)]) == 0
    assert main(["sft", str(RECIPES / "sft-code-tiny.yaml"), f"model.path={made}", f"run.dir={lesson}"]) == 0
    return lesson / "model"


def test_a_tiny_model_improves_on_code_with_every_mechanism_acting(taught: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = str(RECIPES / "code-tiny.yaml")
    assert main(["train", recipe, f"model.path={taught}", f"run.dir={run}", *SHORT]) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, *steps = lines
    total = {key: sum(line.get(key) or 0 for line in steps) for key in ("replay/samples", "groups/reflection")}
    assert total["replay/samples"] > 0
    assert total["groups/reflection"] > 0
    assert sum(line["ranking/samples"] for line in steps) > 0
    assert mean(steps[-3:]) > 2 * mean(steps[:3])
    assert steps[-1]["heldout/accuracy"] > before["heldout/accuracy"] + 0.05
    ids = [query.id for query in load_task(load_config(RECIPES / "code-tiny.yaml").task, seed=0).train]
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        wrong = [sample for samples in buffer.history(ids, outcome=False).values() for sample in samples]
    failed = [sample for sample in wrong if sample.reason == "fail"]
    assert failed
    assert all("assert f([" in sample.feedback and "It got " in sample.feedback for sample in failed)


def mean(steps: list[dict[str, Any]]) -> float:
    return sum(float(line["accuracy"]) for line in steps) / len(steps)


def test_a_graded_reward_is_the_share_of_tests_and_leaves_the_outcome(taught: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ["task.graded=true", "task.heldout=0", "train.steps=1", f"model.path={taught}", f"run.dir={run}"]
    assert main(["train", str(RECIPES / "code-tiny.yaml"), *few]) == 0
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step":1,' in line]
    ids = [query.id for query in load_task(load_config(RECIPES / "code-tiny.yaml").task, seed=0).train]
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        samples = [sample for past in buffer.history(ids).values() for sample in past]
    shares = [sample.reward_parts["tests"] for sample in samples if "tests" in sample.reward_parts]
    assert shares
    assert set(shares) <= {0.0, 1 / 3, 2 / 3}
    assert line["reward/tests"] == pytest.approx(sum(shares) / len(samples))
    assert all(not sample.outcome for sample in samples if "tests" in sample.reward_parts)
