"""Demonstrations, hints and critiques in whole runs: on the embedded sums, resumed, compared, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.run import RunFiles
from tests.train.test_bad_input import refused
from tests.train.tiny import helped, overrides, read_metrics

METHODS = ("luffy", "sage", "critique")
SUMS = (
    *("train", "--quiet", "task.difficulty=[6]", "task.size=8", "task.heldout=4", "rollout.group_size=4"),
    *("train.steps=2", "train.queries_per_step=4", "run.threads=1", "run.tensorboard=false"),
)


def total(lines: list[dict[str, Any]], key: str) -> float:
    return sum(line.get(key, 0) for line in lines[1:])


@pytest.mark.parametrize("method", METHODS)
def test_the_embedded_sums_bring_their_own_help(tmp_path: Path, method: str) -> None:
    assert main([*SUMS, f"method={method}", f"run.dir={tmp_path / 'run'}"]) == 0
    lines = read_metrics(tmp_path / "run")
    rows = [row for step in (1, 2) for row in RunFiles(tmp_path / "run").rollouts.read(step)]
    with SampleBuffer.open_reader(tmp_path / "run" / "buffer.sqlite") as buffer:
        queries = {row["query"] for row in rows}
        kinds = {s.context.kind for samples in buffer.history(queries).values() for s in samples}
    if method == "luffy":
        assert total(lines, "demonstration/joined") == total(lines, "groups") == 8
        assert total(lines, "demonstration/wrong") == 0
        assert all(line["update/tokens/demonstration"] > 0 for line in lines[1:])
        shown = [row for row in rows if row["origin"] == "demonstration"]
        assert shown
        for row in shown:  # 1+2+3= is worked out as 1+2=3+3=6#6
            assert row["response"].startswith(row["query"].split("+")[0] + "+")
            assert row["response"].split("#")[0].endswith(f"={sum(map(int, row['query'].rstrip('=').split('+')))}")
            assert row["advantage"] >= 0
        assert kinds == {"plain"}
    elif method == "sage":
        assert 0 < total(lines, "hint/solved") <= total(lines, "hint/queries") <= total(lines, "groups/solve_none")
        assert kinds == {"plain", "hint"}
    else:
        assert total(lines, "groups/critique") == 4 * total(lines, "groups/solve_none") > 0
        assert total(lines, "critique/joined") <= total(lines, "critique/right")
        assert kinds == {"plain", "critique"}
    assert total(lines, "groups/teaching") > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, method: str) -> None:
    """Its last checkpoint is lost, so that a step is taken again: the same metrics, rollouts and buffer."""
    more = [*helped(tmp_path), "rollout.max_tokens=12"]
    settings = [*overrides(tmp_path, method=method, reward__length_bonus="auto", train__epochs=2), *more]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", "--quiet", *settings, "train.steps=5", f"run.dir={whole}"]) == 0
    assert main(["train", "--quiet", *settings, "train.steps=3", f"run.dir={cut}"]) == 0
    assert RunFiles(cut).checkpoints.steps() == [2, 3]
    shutil.rmtree(cut / "checkpoints" / "step-000003")
    assert main(["train", "--quiet", "--resume", str(cut), "train.steps=5"]) == 0
    # What is evaluated at the end of the shorter run is not in the longer one's third line.
    lines = [[{k: v for k, v in line.items() if not k.startswith("heldout/")} for line in read_metrics(run)]
             for run in (whole, cut)]  # fmt: skip
    assert json.dumps(lines[0], sort_keys=True) == json.dumps(lines[1], sort_keys=True)
    for step in range(1, 6):
        rows = [list(RunFiles(run).rollouts.read(step)) for run in (whole, cut)]
        assert json.dumps(rows[0]) == json.dumps(rows[1])
    keys = {"luffy": "demonstration/joined", "sage": "groups/hint", "critique": "groups/critique"}
    assert total(lines[0], keys[method]) > 0


def test_the_judge_decides_on_demonstrations_unless_they_are_trusted(tmp_path: Path) -> None:
    settings = [*overrides(tmp_path, method="luffy", reward__length_bonus="auto", train__steps=3), *helped(tmp_path)]
    counts = {}
    for trusted in ("false", "true"):
        run = tmp_path / trusted
        assert main(["train", "--quiet", *settings, f"run.dir={run}", f"method.demonstration.trusted={trusted}"]) == 0
        lines = read_metrics(run)
        counts[trusted] = (total(lines, "demonstration/joined"), total(lines, "demonstration/wrong"))
    joined, wrong = counts["false"]
    assert joined > 0
    assert wrong > 0
    assert joined + wrong == 12  # three steps of four queries
    assert counts["true"] == (12, 0)


def test_a_column_of_critiques_is_shown(tmp_path: Path) -> None:
    settings = [*overrides(tmp_path, method="critique", reward__length_bonus="auto", train__steps=3), *helped(tmp_path)]
    settings += ["method.critique.feedback=column", "run.rollouts_groups=100"]
    assert main(["train", "--quiet", *settings]) == 0
    rows = [row for step in (1, 2, 3) for row in RunFiles(tmp_path / "run").rollouts.read(step)]
    asked = [row["prompt"] for row in rows if row["context"] == "critique"]
    assert asked
    assert all(" NOT " in prompt and prompt.partition(" FOR ")[2].startswith("No ") for prompt in asked)


def test_they_can_be_compared(tmp_path: Path) -> None:
    settings = [
        text
        for text in overrides(tmp_path)
        if not text.startswith(("run.dir", "run.seed", "train.epochs", "method=", "reward."))
    ]
    budget = ["--seeds", "1", "--tokens", "100", "--evaluations", "1", "--no-report", "--out", str(tmp_path / "out")]
    assert main(["compare", *settings, *helped(tmp_path), "--methods", ",".join(METHODS), *budget]) == 0
    for name in METHODS:
        assert RunFiles(tmp_path / "out" / "cells" / name / "seed-0").read_info()


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run")], ids=["train", "dry-run"])
@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("luffy", (), "method.demonstration=on needs demonstrations, and no training query of task 'file' has any: "
                      "name the column of a file with task.demonstration_column"),
        ("sage", (), "method.hint=on needs hints, and no training query of task 'file' has any"),
        ("critique", ("method.critique.feedback=column",), "task.feedback_column"),
        ("sage", ("method.hint.max_prompt_tokens=250",), "method.hint.max_prompt_tokens=250 and rollout.max_tokens=12"),
        ("critique", ("method.critique.max_prompt_tokens=250",), "method.critique.max_prompt_tokens=250"),
        ("luffy", ("method.demonstration.trusted=true", "task.rewards=[correct]"),
         "set method.demonstration.trusted=false"),
    ],
)  # fmt: skip
def test_missing_help_is_refused_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    method: str,
    more: tuple[str, ...],
    message: str,
) -> None:
    has = helped(tmp_path) if "max_prompt_tokens" in str(more) else []
    settings = [*overrides(tmp_path, method=method, reward__length_bonus="auto"), *has, *more]
    assert message in refused(capsys, *command, *settings)
    assert not (tmp_path / "run").exists()


def test_demonstrations_that_are_all_too_long_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*overrides(tmp_path, method="luffy", reward__length_bonus="auto"), *helped(tmp_path)]
    line = refused(capsys, "train", *settings, "method.demonstration.max_tokens=3")
    assert "is longer than 3 tokens; raise method.demonstration.max_tokens" in line
    line = refused(capsys, "train", *settings, "method.demonstration.max_tokens=255")
    assert "method.demonstration.max_tokens=255 behind a prompt of" in line
