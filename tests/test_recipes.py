"""Every recipe of the repository is a valid config."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3.config import load_config
from r3.models.tiny import Shape

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads(path: Path) -> None:
    config = load_config(path)
    if config.method.reflection.enabled and not path.stem.startswith("sft-"):
        assert config.method.reflection.max_prompt_tokens + config.rollout.max_tokens <= 131_072


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
