"""Training on code for real: a tiny model that writes programs learns what they should do by running them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.config import load_config
from r3.tasks import load_task

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
    assert all("assert f([" in sample.feedback and "It got [" in sample.feedback for sample in failed)


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
