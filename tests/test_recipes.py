"""Every recipe of the repository is a valid config.

Covers r3.models.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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
