"""One config tree: defaults, recipe, overrides; what is printed reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from r3.config import Config, dump, load_config, read_recipe, validate
from r3.config_text import describe
from r3.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_print_config_reads_back_to_the_same_config() -> None:
    config = load_config(None, ["method=dapo", "method.replay.k=7", "train.learning_rate=3e-5", "buffer.total=null"])
    assert validate(yaml.safe_load(describe(config))) == config
    assert validate(yaml.safe_load(dump(config))) == config


def test_every_setting_is_explained() -> None:
    text = describe(Config())
    for before, after in zip(text.split("\n"), text.split("\n")[1:], strict=False):
        if after.strip() and not after.strip().startswith(("#", "-")):
            assert before.strip().startswith(("#", "-")) or before.endswith(":"), after
            assert before.strip() != "#", f"{after} has no help text"


def test_overrides_lie_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method:\n  name: r3\n  replay: {k: 5}\n  ranking: off\ntrain: {epochs: 2}\n")
    config = load_config(recipe, ["train.epochs=4", "method.replay.max_age=100"])
    assert (config.train.epochs, config.method.replay.k, config.method.replay.max_age) == (4, 5, 100)
    assert not config.method.ranking.enabled
    # A preset on the command line replaces the recipe's preset and keeps its single settings.
    other = load_config(recipe, ["method=grpo"]).method
    assert (other.name, other.replay.enabled, other.replay.k) == ("grpo", False, 5)
    assert load_config(recipe, ["method.ranking.max_reward=0.3"]).method.ranking.max_reward == 0.3
    assert load_config(recipe, ["method.ranking=on"]).method.ranking.enabled
    assert not load_config(None, ["method.replay=off"]).method.replay.enabled


def test_another_model_or_task_starts_from_the_general_defaults() -> None:
    assert load_config(None, []).train.learning_rate == 2e-4
    assert load_config(None, ["method=grpo"]).rollout.max_tokens == 44
    own = load_config(None, ["model.path=some/model", "method=grpo"])
    assert own.train.learning_rate == 1e-6
    assert own.model.device == "auto"
    assert load_config(None, ["task.name=file", "task.path=x.jsonl"]).rollout.max_tokens == 1024


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("trian.epochs=1", "trian: no such setting; did you mean train?"),
        ("train.epoch=1", "did you mean train.epochs?"),
        ("temperature=1", "did you mean rollout.temperature?"),
        ("model.lora.rnk=4", "did you mean model.lora.rank?"),
        ("run.zzz=1", "valid here: dir, seed"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
        load_config(None, [key])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    validate(read_recipe(recipe))
