"""A budget of generated tokens ends a run; evaluation goes by tokens, with several answers; both resume exactly.

Covers r3.evaluate.heldout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.evaluate.heldout import HeldOut
from tests.train.tiny import overrides, read_metrics

BUDGET = {"train__tokens": 700, "train__epochs": 50, "evaluate__every_tokens": 200, "evaluate__samples": 3}


def test_a_run_resumed_with_a_larger_budget_is_the_run_that_had_it(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert main(["train", "--quiet", *overrides(tmp_path / "whole", **BUDGET)]) == 0
    same = {"model__path": tmp_path / "whole" / "model", "task__path": tmp_path / "whole" / "task.jsonl"}
    first = overrides(tmp_path / "parts", **same, **{**BUDGET, "train__tokens": 250})
    assert main(["train", "--quiet", *first]) == 0
    assert main(["train", "--quiet", "--resume", str(tmp_path / "parts" / "run"), "train.tokens=700"]) == 0

    def without_evaluation(name: str) -> list[dict[str, Any]]:
        lines = read_metrics(tmp_path / name / "run")  # the shorter run evaluated at its own end, too
        return [{k: v for k, v in line.items() if not k.startswith("heldout")} for line in lines]

    assert without_evaluation("parts") == without_evaluation("whole")
    lines = read_metrics(tmp_path / "whole" / "run")
    assert lines[-1]["tokens/total"] >= 700 > lines[-2]["tokens/total"]
    evaluated = [line for line in lines if "heldout/pass@3" in line]
    assert {line["heldout/total"] for line in evaluated} == {12}  # four problems, three answers each
    assert all(line["heldout/pass@3"] >= line["heldout/accuracy"] for line in evaluated)


def test_several_answers_are_averaged_within_problems() -> None:
    found = HeldOut(right=[0, 1, 4, 0], samples=4, truncated=0.25, mean_tokens=9.0, rewards={}).metrics()
    assert found["heldout/accuracy"] == 5 / 16
    assert found["heldout/pass@4"] == 2 / 4
    assert found["heldout/low"] < 5 / 16 < found["heldout/high"]
    one = HeldOut(right=[0, 1, 1, 0], samples=1, truncated=0.0, mean_tokens=9.0, rewards={}).metrics()
    assert not any("pass@" in key for key in one)
    assert one["heldout/low"] == pytest.approx(0.15, abs=0.005)  # Wilson's interval for 2 of 4
    assert one["heldout/high"] == pytest.approx(0.85, abs=0.005)


def test_held_out_answers_may_be_longer_than_those_in_training(tmp_path: Path) -> None:
    """The same run with four times the limit in evaluation alone: longer held-out answers, the same training."""
    lines = {}
    for name, more in (("same", {}), ("longer", {"evaluate__max_tokens": 48})):
        (tmp_path / name).mkdir()
        settings = overrides(tmp_path / name, train__steps=2, evaluate__samples=8, **more)
        assert main(["train", "--quiet", *settings]) == 0
        lines[name] = read_metrics(tmp_path / name / "run")
    short, long = lines["same"][0], lines["longer"][0]
    assert long["heldout/tokens"] > 12 >= short["heldout/tokens"]
    assert long["heldout/truncated"] < short["heldout/truncated"]
    assert [line.get("length/max") for line in lines["same"]] == [line.get("length/max") for line in lines["longer"]]
    assert max(line.get("length/max", 0) for line in lines["longer"]) == 12
