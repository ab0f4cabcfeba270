"""`buffer.successes_from`: a run that starts with the successes of another."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.run import RunFiles
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, read_metrics, save_model


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run of two steps, in which every problem is met once."""
    run = tmp_path / "first"
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=2, run__dir=run)]) == 0
    return run


def second(folder: Path, first: Path, **more: Any) -> list[str]:
    settings = {"method": "rlep", "reward__length_bonus": "auto", "train__steps": 2, **more}
    return overrides(folder, buffer__successes_from=first, **settings)


def test_rlep_replays_the_successes_of_an_earlier_run_and_resumes_with_them(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *second(tmp_path, first)]) == 0
    with SampleBuffer.open_reader(first / "buffer.sqlite") as buffer:
        rows = list(RunFiles(tmp_path / "run").rollouts.read(1))
        past = buffer.history({row["query"] for row in rows}, outcome=True)
    replayed = [row for row in rows if row["origin"] == "replayed"]
    assert replayed
    for row in replayed:
        assert (row["step"], row["policy_version"], row["outcome"]) == (0, 0, True)
        assert math.isnan(row["id"])  # none: ids of two buffers would clash
        assert row["tokens"] in [sample.tokens.tolist() for sample in past[row["query"]]]
    own = RunFiles(tmp_path / "run").buffer_path
    with SampleBuffer.open_reader(own) as buffer:
        assert buffer.stats().samples == sum(line["groups"] for line in read_metrics(tmp_path / "run")[1:]) * 4
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run"), "train.steps=3"]) == 0
    # The pool is part of what a run computes with: another would make another run of it.
    assert main(["train", "--quiet", "--resume", str(first), "train.steps=3"]) == 0
    capsys.readouterr()
    line = refused(capsys, "train", "--resume", tmp_path / "run", "train.steps=4", code=1)
    assert "the buffer of buffer.successes_from changed" in line


def test_a_run_that_is_missing_or_reads_other_texts_is_refused(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(settings: list[str]) -> str:
        capsys.readouterr()
        line = refused(capsys, "train", *settings)
        assert not (tmp_path / "run").exists()
        return line

    assert "buffer.successes_from: " in said(second(tmp_path, tmp_path / "none"))
    other = save_model(tmp_path / "other")
    tokenizer = copy.deepcopy(char_tokenizer())  # it is shared by all tests
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    assert "its tokenizer has another vocabulary" in said(second(tmp_path, first, model__path=other))
    info = json.loads((first / "run.json").read_text())
    del info["inputs"]["vocabulary"]
    (first / "run.json").write_text(json.dumps(info))
    assert "did not note its vocabulary" in said(second(tmp_path, first))


def test_a_run_of_other_problems_is_refused(tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": f"other{i}", "problem": f"{i}?", "answer": "50"} for i in range(12)]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    line = refused(capsys, "train", *second(tmp_path, first, task__path=tmp_path / "others.jsonl"))
    assert "it solved none of this run's 8 training problems (0 were tried)" in line


@pytest.mark.parametrize(
    ("method", "more"),
    [("exgrpo", {"method__revisit__start_at": "null"}), ("repo", {"method__replay__min_history": 4})],
)
def test_past_answers_are_replayed_once_queries_come_again(tmp_path: Path, method: str, more: dict[str, Any]) -> None:
    settings = overrides(tmp_path, method=method, reward__length_bonus="auto", train__steps=3, **more)
    assert main(["train", "--quiet", *settings]) == 0
    line = read_metrics(tmp_path / "run")[-1]
    assert line["replay/joined"] > 0
    assert line["update/grad_norm"] > 0
