"""Every recipe of the repository is a valid config, and every command of recipes/evidence.py a valid one.

Covers r3.models.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from r3.cli import _parsed
from r3.compare.plan import make_plan
from r3.config import load_config, validate
from r3.errors import ConfigError
from r3.models import Shape

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads(path: Path) -> None:
    config = load_config(path)
    if config.method.reflection.enabled and not path.stem.startswith("sft-"):
        assert config.method.reflection.max_prompt_tokens + config.rollout.max_tokens <= 131_072


@pytest.fixture(scope="module")
def schema() -> Any:
    done = subprocess.run([sys.executable, "-m", "r3", "train", "--schema"], capture_output=True, text=True, check=True)
    given = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(given)
    return jsonschema.Draft202012Validator(given)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_for_editors_takes_it(path: Path, schema: Any) -> None:
    assert [error.message for error in schema.iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize(
    "recipe",
    [
        {"method": "grpo"},
        {"method": {"replay": "off", "objective": "gspo", "ranking": False}, "reward": {"overlong": True}},
        {"task": {"name": "file", "path": "my.csv", "rows": [0, 5]}},
        {"model": {"lora": True}},
    ],
)
def test_short_forms_are_in_the_schema(recipe: Any, schema: Any) -> None:
    validate(recipe)
    schema.validate(recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        {"method": "ppo"},
        {"method": {"repaly": "off"}},
        {"train": {"steps": 0}},
        {"model": {"lora": "perhaps"}},
        {"task": {"name": "file"}},
        {"task": {"name": "arithmetic", "path": "my.csv"}},
    ],
)
def test_what_the_command_refuses_the_schema_refuses_too(recipe: Any, schema: Any) -> None:
    with pytest.raises(ConfigError):
        validate(recipe)
    assert not schema.is_valid(recipe)


def test_comparisons_on_a_card_warm_start_and_reinforce_on_different_problems() -> None:
    warm, rest = (load_config(RECIPES[0].parent / f"{name}gsm8k-smollm2.yaml").task for name in ("sft-", ""))
    assert warm.rows is not None
    assert rest.rows is not None
    assert warm.rows[1] <= rest.rows[0]


def test_the_tiny_model_is_taught_the_reflection_prompt_that_it_meets() -> None:
    lesson, rest = (load_config(RECIPES[0].parent / f"{name}spelling-tiny.yaml") for name in ("sft-", ""))
    said = [config.method.reflection for config in (lesson, rest)]
    for name in ("template", "cut_marker", "max_prompt_tokens"):
        assert getattr(said[0], name) == getattr(said[1], name)
    assert (lesson.task.split, rest.task.split) == ("warm", "train")
    assert rest.method.reflection.max_prompt_tokens + rest.rollout.max_tokens <= Shape().context


# recipes/evidence.py: every command it would give is a valid one, and the rung is chosen by the warm start alone.


ROOT = Path(__file__).parents[1]


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "recipes" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evidence", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["sums", "spelling", "rewriting", "reversal", "longer-lists", "filtering", "gsm8k"])
def test_its_commands_are_valid(evidence: ModuleType, name: str) -> None:
    begin, answer, retry = (_parsed(command) for command in evidence.lessons(evidence.warm_start_of(name), []))
    learnt, answered, retried = (load_config(Path(one.recipe), one.overrides) for one in (begin, answer, retry))
    assert (learnt.run.dir, answered.run.dir) == (f"runs/sft-{evidence.warm_start_of(name)}", retried.task.retries_from)
    assert answered.task.model_copy(update={"retries_from": answered.run.dir}) == retried.task  # the same problems
    assert {answered.model.path, retried.model.path} == {f"{learnt.run.dir}/model"}
    options = argparse.Namespace(set=["model.compile=false"], seeds=range(2, 5), tokens=1000, jobs=2, methods=None)
    for place in range(len(evidence.TASKS[name].ladder)):
        tried = _parsed(evidence.probe(name, place, options.set))
        config = load_config(Path(tried.recipe), tried.overrides)
        assert (config.train.steps, config.model.path) == (1, f"{retried.run.dir}/model")
        compared = _parsed(evidence.comparison(name, place, options))
        plan = make_plan(
            compared.recipe,
            compared.overrides,
            methods=compared.methods.split(","),
            variants=compared.variant,
            seeds=compared.seeds,
            tokens=compared.tokens,
            evaluations=compared.evaluations,
            baseline=compared.baseline,
        )
        assert {"grpo", "dapo", "r3"} <= {variant.name for variant in plan.variants}
        assert plan.seeds == (2, 3, 4)
        asked = [load_config(Path(c.recipe), c.overrides) for c in map(_parsed, evidence.surveys(name, place, options))]
        assert [one.run.seed for one in asked] == ([2, 3, 4] if evidence.TASKS[name].surveyed else [])
        chosen = plan.config(plan.variants[0]).task  # of what was tried and surveyed, by what came of it
        assert {one.run.dir for one in asked} == ({chosen.pass_rates_from} - {None})
        every = chosen.model_copy(update={"pass_rates_from": None, "min_pass_rate": 0.0, "max_pass_rate": 1.0})
        assert all(one == every for one in [config.task, *(one.task for one in asked)])
        assert plan.config(plan.variants[0]).rollout == config.rollout


@pytest.mark.parametrize(
    ("found", "wanted"),
    [([0.5, 0.12, 0.025, 0.001], 2), ([0.2, 0.035, 0.0, 0.0], 1), ([0.2, 0.08, 0.0, 0.0], None)],  # None: left out
)
def test_the_rung_is_the_one_nearest_to_what_is_wanted(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[float], wanted: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert evidence.rungs_to_try("spelling") == [0, 1, 2, 3]
    for place, accuracy in enumerate(found):
        folder = evidence.probe_path("spelling", place)
        folder.mkdir(parents=True)
        lines = [{"step": 0, "heldout/accuracy": accuracy}, {"step": 1, "heldout/accuracy": 0.05}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evidence.rung("spelling") == wanted
    assert evidence.rungs_to_try("spelling") == []
