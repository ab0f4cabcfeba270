"""`r3 sft` from the command line: what it learns from, that it learns, and that its folder is a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.policy.model import Policy
from r3.policy.packing import Trajectory
from tests.train.tiny import overrides, read_metrics, save_model


def recipe(folder: Path, **more: Any) -> list[str]:
    """`r3 sft` with rows whose solution always begins alike, so that a tiny model can learn some of it."""
    save_model(folder / "model")
    rows = [
        {"id": f"q{i}", "problem": f"{i}+1?", "answer": str(i + 1), "solution": f"so {i}+1 = {i + 1}"}
        for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text("method: r3\n")
    settings = overrides(
        folder,
        task__path=folder / "rows.jsonl",
        task__verifier="boxed",
        task__heldout=8,
        rollout__max_tokens=60,
        train__queries_per_step=8,
        train__epochs=4,
        train__learning_rate="1e-2",
        **more,
    )
    return ["sft", str(folder / "recipe.yaml"), *settings]


def test_it_learns_and_writes_a_model_that_training_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(recipe(tmp_path)) == 0
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 1 + 4 * 4  # the start, and 32 examples in batches of 8, four times
    assert lines[-1]["heldout/loss"] < 0.6 * lines[0]["heldout/loss"]
    assert [line["epoch"] for line in lines[1:]] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert all(("heldout/loss" in line) == (place % 4 == 0) for place, line in enumerate(lines))
    folder = tmp_path / "run" / "model"
    assert f"model.path={folder}" in capsys.readouterr().out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    # The reported loss is the mean negative log-likelihood of the response, its box and its end included.
    total, count = 0.0, 0
    for i in range(32, 40):
        prompt = tokenizer.encode(f"{i}+1?")
        response = [*tokenizer.encode(f"so {i}+1 = {i + 1}\n\\boxed{{{i + 1}}}"), tokenizer.eos_token_id]
        with torch.no_grad():
            logs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        total -= sum(float(logs[len(prompt) + j - 1, token]) for j, token in enumerate(response))
        count += len(response)
    assert lines[-1]["heldout/loss"] == pytest.approx(total / count, rel=1e-3)
    assert main([*recipe(tmp_path), f"run.dir={tmp_path / 'run'}"]) == 2
    assert "holds a finished warm start" in capsys.readouterr().err


def test_the_same_seed_learns_the_same_and_a_killed_one_starts_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert main(recipe(tmp_path / "a", train__steps=3)) == 0
    arguments = recipe(tmp_path / "b", train__steps=3)
    assert main(arguments) == 0
    whole = read_metrics(tmp_path / "a" / "run")
    assert read_metrics(tmp_path / "b" / "run") == whole
    for path in sorted((tmp_path / "b" / "run" / "model").iterdir()):  # as a kill before the end leaves it
        path.unlink()
    (tmp_path / "b" / "run" / "model").rmdir()
    assert main(arguments) == 0
    assert read_metrics(tmp_path / "b" / "run") == whole
    assert (tmp_path / "b" / "run" / "model" / "model.safetensors").exists()


def test_it_leaves_a_training_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*recipe(tmp_path), "train.steps=1", "rollout.max_tokens=40"]
    assert main(["train", "--quiet", *arguments[1:]]) == 0
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(arguments) == 2
    assert "holds another run" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_it_learns_to_try_again_from_a_runs_own_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [*recipe(tmp_path), f"run.dir={tmp_path / 'answers'}", "rollout.max_tokens=40"]
    assert main(["train", "--quiet", *first[1:], "method=grpo", "train.steps=2", "rollout.group_size=2"]) == 0
    with SampleBuffer.open_reader(tmp_path / "answers" / "buffer.sqlite") as buffer:
        wrong = buffer.history([f"q{i}" for i in range(40)], outcome=False)
    failed = {query for query, samples in wrong.items() if samples}
    assert 0 < len(failed) < 32
    learnt: list[Trajectory] = []
    monkeypatch.setattr(Policy, "statistics", _noting(Policy.statistics, learnt))
    template = "method.reflection.template='{question} was {attempt} now'"
    again = [*recipe(tmp_path), template, "train.epochs=1", "task.heldout=8"]
    assert main([*again, f"task.retries_from={tmp_path / 'answers'}"]) == 0
    told = f"{32 + len(failed)} solutions, {len(failed)} of them after a failed attempt (0 too long)"
    assert told in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    shown = [(tokenizer.decode(one.prompt), tokenizer.decode(one.response)) for one in learnt]
    retried = {prompt: response for prompt, response in shown if " was " in prompt}
    allowed = {
        f"{query[1:]}+1? was {tokenizer.decode(one.tokens, skip_special_tokens=True).strip()} now": query
        for query in failed
        for one in wrong[query]
    }
    assert {allowed[prompt] for prompt in retried} == failed  # a wrong answer of the query's own, one a query
    for prompt, response in retried.items():
        i = int(allowed[prompt][1:])
        assert response.startswith(f"so {i}+1 = {i + 1}")
    assert main([*recipe(tmp_path), f"run.dir={tmp_path / 'c'}", f"task.retries_from={tmp_path / 'nowhere'}"]) == 1
    assert "not a run directory" in capsys.readouterr().err
    other = ["task.id_column=problem", f"run.dir={tmp_path / 'd'}", f"task.retries_from={tmp_path / 'answers'}"]
    assert main([*recipe(tmp_path), *other]) == 2
    assert "holds no wrong answer to these problems" in capsys.readouterr().err


def _noting(statistics: Any, learnt: list[Trajectory]) -> Any:
    def noting(self: Policy, trajectories: list[Trajectory], **more: Any) -> Any:
        if torch.is_grad_enabled():
            learnt.extend(trajectories)
        return statistics(self, trajectories, **more)

    return noting


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model__lora__enabled": "true"}, "r3 sft trains whole models"),
        ({"rollout__max_tokens": 3}, "no solution has at most rollout.max_tokens=3 tokens"),
        ({"task__path": "rows2.jsonl"}, "no written solutions"),
    ],
)
def test_data_that_cannot_be_learnt_from_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    rows = [{"id": str(i), "problem": f"{i}?", "answer": "1"} for i in range(12)]
    (tmp_path / "rows2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = recipe(tmp_path)
    if "task__path" in change:
        arguments.append(f"task.path={tmp_path / 'rows2.jsonl'}")
    else:
        arguments += [f"{key.replace('__', '.')}={value}" for key, value in change.items()]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "model").exists()
