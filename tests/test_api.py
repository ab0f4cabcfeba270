"""Training from Python: `r3.train` and its `Run`, as a script and as a notebook's kernel use them.

Covers r3.tasks.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

import r3
from r3.cli import main
from r3.errors import ConfigError, RunError, TaskError
from tests.train.tiny import ROOT, judge, read_metrics, run_r3, save_model

ROWS = [{"id": f"q{i}", "problem": f"What is {i} + {i}?", "answer": str((i * 37) % 101)} for i in range(12)]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Sections of a run of two small steps."""
    if not (folder / "model").exists():
        save_model(folder / "model")
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": folder / "model", "device": "cpu"},
        "task": {"chat": False, "instruction": "", "verifier": "tests.train.tiny.judge", "heldout": 4},
        "method": {
            "reflection": {
                "max_prompt_tokens": 200,
                "template": "{question} NOT {attempt} BUT ",
                "cut_marker": "...",
            }
        },
        "rollout": {"group_size": 4, "max_tokens": 12, "max_rows": 16},
        "train": {"queries_per_step": 4, "epochs": 1, "learning_rate": 1e-3},
        "run": {"dir": folder / "run", "threads": 1, "tensorboard": False, "checkpoint_every": 1},
    }
    for name, section in more.items():
        sections[name] = {**sections.get(name, {}), **section} if isinstance(section, Mapping) else section
    return sections


def test_rows_in_a_run_out(tmp_path: Path) -> None:
    run = r3.train(dataset=ROWS, **settings(tmp_path))
    assert isinstance(run, r3.Run)
    assert run.stopped_by is None
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert run.step == run.checkpoint.step == 2
    assert run.config.task.heldout == 4
    with run.buffer as buffer:
        assert buffer.stats().samples >= 2 * 4 * 4
    expected = AutoModelForCausalLM.from_pretrained(run.checkpoint.path / "policy")
    trained = run.policy.model.state_dict()
    assert all(trained[name].equal(weight) for name, weight in expected.state_dict().items())
    assert run.policy.tokenizer("What").input_ids


def test_an_evaluation_is_that_of_the_last_step_and_of_other_rows(tmp_path: Path) -> None:
    run = r3.train(dataset=ROWS, **settings(tmp_path))
    measured = run.evaluate()
    assert measured["accuracy"] == run.metrics[-1]["heldout/accuracy"]
    assert measured["right_each"] == run.metrics[-1]["heldout/right_each"]
    always = run.evaluate([{"problem": f"Is it {i}?", "answer": "100"} for i in range(6)], samples=2)
    assert always["total"] == 12
    assert always["truncated"] + always["accuracy"] == 1.0  # the judge takes any complete answer for right


def _pandas(rows: list[dict[str, Any]]) -> Any:
    import pandas

    return pandas.DataFrame(rows)


def _datasets(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("kind", [_pandas, _datasets, iter])
def test_every_kind_of_rows_is_the_same_run(kind: Any, tmp_path: Path) -> None:
    rows = [{**row, "answer": int(row["answer"]), "level": 1.5} for row in ROWS]
    run = r3.train(dataset=kind(rows), **settings(tmp_path, train={"steps": 1}))
    kept = [json.loads(line) for line in (run.directory / "dataset.jsonl").read_text().splitlines()]
    assert kept == rows


def test_it_is_the_run_of_the_command(tmp_path: Path) -> None:
    run = r3.train(dataset=ROWS, **settings(tmp_path))
    config = yaml.safe_load((run.directory / "config.yaml").read_text())
    assert config["task"]["path"] == "dataset.jsonl"
    config["task"]["path"] = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config["run"]["dir"] = str(tmp_path / "again")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--quiet", str(tmp_path / "recipe.yaml")]) == 0
    assert read_metrics(tmp_path / "again") == read_metrics(run.directory)


def test_a_run_with_its_rows_can_be_moved_and_resumed(tmp_path: Path) -> None:
    heldout = [{"problem": "Held out?", "answer": "60"}]
    whole = r3.train(dataset=ROWS, heldout=heldout, **settings(tmp_path))
    elsewhere = settings(tmp_path, run={"dir": tmp_path / "part"})
    part = r3.train(dataset=ROWS, heldout=heldout, callbacks=[lambda step, metrics: step == 1], **elsewhere)
    assert (part.stopped_by, part.step, whole.step) == ("callback", 1, 3)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(part.directory, moved)
    run_r3("train", "--resume", moved)
    assert read_metrics(moved) == read_metrics(whole.directory)


def brief(completion: str) -> float:
    """A reward that a module holds."""
    return 1.0 / (1 + len(completion))


class Scale:
    """An object that can be called."""

    def __call__(self, completion: str) -> float:
        return len(completion) / 100


def mixed_rewards() -> list[Any]:
    """Every kind: by path, from a module, a closure, async, a lambda, an object."""
    share = "50"

    def half(completion: str) -> bool:
        return judge(completion, share)

    async def slow(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if columns["answer"] == ["0"] else 0.5]

    short = {"function": lambda completion: len(completion) < 8, "name": "short", "weight": 0.1}
    return ["tests.train.tiny.judge", brief, (half, 0.5), (slow, 2), short, Scale()]


def refused(*arguments: Any) -> str:
    """What `r3 …` says when it ends with exit code 2."""
    done = run_r3(*arguments, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_rewards_as_objects(tmp_path: Path) -> None:
    sections = settings(tmp_path, task={"verifier": "math", "outcome": "judge"}, run={"dir": tmp_path / "part"})
    part = r3.train(dataset=ROWS, rewards=mixed_rewards(), callbacks=[lambda step, _: step == 1], **sections)
    names = ["judge", "brief", "half", "slow", "short", "Scale"]
    assert {f"reward/{name}" for name in names} <= part.metrics[1].keys()
    with part.buffer as buffer:
        samples = [
            s for found in buffer.history([row["id"] for row in ROWS]).values() for s in found if not s.truncated
        ]
    assert samples
    assert all(sample.reward_parts.get("half") in (0.0, 0.5) for sample in samples)
    assert {sample.reward_parts["slow"] for sample in samples if "slow" in sample.reward_parts} == {1.0}
    assert [one.function for one in part.config.task.rewards] == [
        *("tests.train.tiny.judge", "tests.test_api.brief"),
        *["given"] * 4,
    ]
    assert part.evaluate()["total"] == 4

    again = r3.Run(part.directory)
    with pytest.raises(TaskError, match=r"'half' was given to r3\.train as an object.*rewards=\[…\]"):
        again.evaluate()
    with pytest.raises(TaskError, match="'half' was given"):
        r3.train(resume=again)
    assert "'half' was given" in refused("train", "--resume", part.directory)
    assert "r3 eval --judge" in refused("eval", part.directory)
    assert r3.Run(part.directory, rewards=mixed_rewards()).evaluate()["total"] == 4
    with pytest.raises(ConfigError, match=r"made with other settings \(task\.rewards\)"):
        r3.train(resume=again, rewards=mixed_rewards()[:-1])

    whole = r3.train(dataset=ROWS, rewards=mixed_rewards(), **{**sections, "run": {"dir": tmp_path / "whole"}})
    resumed = r3.train(resume=str(part.directory), rewards=mixed_rewards())
    assert read_metrics(resumed.directory) == read_metrics(whole.directory)
    assert r3.train(resume=resumed, train={"epochs": 2}).step == 4  # a run of this session still has them


def test_a_reward_of_a_module_is_found_by_the_command_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "scores_of_mine.py").write_text("def odd(completion):\n    return len(completion) % 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    odd = importlib.import_module("scores_of_mine").odd
    run = r3.train(dataset=ROWS, rewards=odd, **settings(tmp_path, task={"verifier": "math"}, train={"steps": 1}))
    assert run.config.task.rewards[0].function == "scores_of_mine.odd"
    run_r3("train", "--resume", run.directory, "train.steps=2")
    assert r3.Run(run.directory).step == 2


@pytest.mark.parametrize(
    ("rewards", "more", "told"),
    [
        ([lambda completion: 1.0], {}, "a lambda has no name to log it by"),
        ([Scale], {}, "number 1: .*Scale.* is no reward"),
        ([brief, 0.5], {}, "number 2: 0.5 is no reward"),
        ([brief, Scale()], {}, r"outcome is needed with several rewards.*\(brief, Scale\)"),
        ([brief, (brief, 0.2)], {"outcome": "brief"}, "two rewards are called 'brief'"),
        ([{"function": Scale(), "caged": True}], {}, "only a function named by its dotted path can be caged"),
        ([brief], {"rewards": ["tests.train.tiny.judge"]}, r"rewards=… and task\.rewards both say"),
        (["given"], {}, "'given' was given to r3.train as an object"),
    ],
)
def test_what_is_no_reward_is_refused(rewards: Any, more: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, TaskError), match=told):
        r3.train(dataset=ROWS, rewards=rewards, **settings(tmp_path, task={"verifier": "math", **more}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_callbacks_are_told_of_steps_and_checkpoints_and_can_end_a_run(tmp_path: Path) -> None:
    told: list[Any] = []

    class Watching(r3.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            assert metrics["step"] == step
            told.append(("step", step, "reward" in metrics))

        def on_checkpoint(self, step: int, folder: Path) -> bool:
            told.append(("checkpoint", step, (folder / "policy" / "config.json").exists()))
            return step == 2

    run = r3.train(dataset=ROWS, callbacks=[Watching()], **settings(tmp_path, train={"epochs": 5}))
    assert told == [
        ("step", 0, False),
        *[("step", 1, True), ("checkpoint", 1, True)],
        *[("step", 2, True), ("checkpoint", 2, True)],
    ]
    assert (run.stopped_by, run.step) == ("callback", 2)
    assert r3.train(resume=run, train={"epochs": 2}).step == 4


def test_what_a_callback_happens_to_return_ends_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="return True to end the run"):
        r3.train(dataset=ROWS, callbacks=[lambda step, metrics: "on"], **settings(tmp_path))
    with pytest.raises(TypeError, match=r"give a function f\(step, metrics\)"):
        r3.train(dataset=ROWS, callbacks=[r3.Callback], **settings(tmp_path, run={"dir": tmp_path / "other"}))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("dataset", "more", "told"),
    [
        ([{"problem": "a?"}], {}, "nothing in column 'answer'"),
        ([1], {}, "row 1: a int, not a mapping"),
        ({"train": ROWS}, {}, "keys train; give the rows of one of them"),
        ("my.jsonl", {}, "a file goes into task.path"),
        ([{"problem": "a?", "answer": object()}], {}, "row 1, column 'answer': a object"),
        (ROWS, {"task": {"heldout": 12}}, "nothing is left to train on"),
        (ROWS, {"task": {"path": "other.jsonl"}}, "task.path and dataset=… both say"),
        (ROWS, {"trian": {"steps": 2}}, "did you mean train"),
        (ROWS, {"rollout": {"max_tokens": 10_000}}, "the model's context is"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing(dataset: Any, more: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, TaskError), match=told) as raised:
        r3.train(dataset=dataset, **settings(tmp_path, **more))
    assert isinstance(raised.value, ValueError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("work of years")
    with pytest.raises(RunError, match="not empty and not a run directory"):
        r3.train(dataset=ROWS, **settings(tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    run = r3.train(dataset=ROWS, **settings(tmp_path, run={"dir": tmp_path / "mine"}))
    with pytest.raises(RunError, match="already holds a run"):
        r3.train(dataset=ROWS[:6], **settings(tmp_path, run={"dir": tmp_path / "mine"}))
    assert len((run.directory / "dataset.jsonl").read_text().splitlines()) == len(ROWS)


def test_naming_a_method_resets_what_it_governs_whatever_the_order(tmp_path: Path) -> None:
    recipe = {"method": {"name": "r3", "replay": {"k": 3}}}
    run = r3.train(recipe, dataset=ROWS, **settings(tmp_path, method={"replay": {"enabled": True}, "name": "grpo"}))
    method = run.config.method
    assert (method.name, method.replay.enabled, method.replay.k) == ("grpo", True, 3)
    assert not method.reflection.enabled


def test_a_notebooks_event_loop_is_no_hindrance(tmp_path: Path) -> None:
    async def cell() -> r3.Run:
        return r3.train(dataset=ROWS, **settings(tmp_path, train={"steps": 1}))

    assert asyncio.run(cell()).step == 1


def test_interrupting_the_kernel_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    code = f"""
import os, signal, r3
from tests.test_api import ROWS, settings
from pathlib import Path
def interrupt(step, metrics):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)
run = r3.train(dataset=ROWS, callbacks=[interrupt], **settings(Path({str(tmp_path)!r}), train={{"epochs": 9}}))
mended = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("went on", run.stopped_by, run.step, run.checkpoint.step, mended)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "went on SIGINT 1 1 True" in done.stdout, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> r3.Run:
    return r3.train(dataset=ROWS, **settings(tmp_path, train={"steps": 1}))


def test_its_pages_are_served_until_they_are_closed(run: r3.Run) -> None:
    with run.view(port=0) as viewer:
        assert viewer.url in viewer._repr_html_()
        with urllib.request.urlopen(f"{viewer.url}api/runs") as answer:
            assert run.directory.name in answer.read().decode()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(viewer.url)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run directory"):
        r3.Run(tmp_path)
