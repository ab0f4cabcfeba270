"""One config tree: defaults, recipe, overrides; what is printed reads back.

Covers r3.config_text, r3.settings, r3.policy.settings.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from r3.cli import main
from r3.config import Config, changes, dump, load_config, read_recipe, validate
from r3.config_text import describe
from r3.errors import ConfigError
from r3.method.presets import GOVERNED, METHODS
from r3.method.settings import ObjectiveSettings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_print_config_reads_back_to_the_same_config() -> None:
    config = load_config(None, ["method=dapo", "method.replay.k=7", "train.learning_rate=3e-5", "buffer.total=null"])
    assert validate(yaml.safe_load(describe(config))) == config
    assert validate(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method=dapo"],
        ["method=maxrl", "method.objective=gspo", "task.size=3"],
        ["method.objective=dapo", "method.replay=off", "reward.overlong=off"],
        ["task.name=file", "task.path=problems.jsonl", "model.path=my-model"],
    ],
)
def test_only_what_differs_reads_back_to_the_same_config(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    assert validate(yaml.safe_load(changes(config))) == config
    assert len(changes(config)) < len(describe(config)) / 2


def test_print_config_changed_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("method: {name: dapo, objective: {clip_high: 0.3}}\n")
    assert main(["train", str(recipe), "--print-config", "--changed"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"method": {"name": "dapo", "objective": {"clip_high": 0.3}}}
    assert main(["train", str(recipe), "--changed"]) == 2
    assert "--changed is for --print-config" in capsys.readouterr().err


@pytest.mark.parametrize("before", METHODS)
def test_a_method_named_over_a_whole_config_is_that_method(
    before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`r3 train --print-config > my.yaml; r3 train my.yaml method=grpo`, for every pair of methods."""

    def printed(*arguments: str) -> str:
        assert main(["train", *arguments, "--print-config"]) == 0
        return capsys.readouterr().out

    mine = tmp_path / "my.yaml"
    tuned = ["method.replay.max_age=7", "method.reflection.give_up_after=3", "train.steps=5"]
    mine.write_text(printed(f"method={before}", *tuned))
    for after in METHODS:
        expected = printed(f"method={after}", *tuned)
        assert printed(str(mine), f"method={after}") == expected
        assert printed(str(mine), f"method.name={after}") == expected
        assert validate(yaml.safe_load(expected)).method.replay.max_age == 7


def test_what_a_file_says_beside_a_method_holds_until_another_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method:\n  name: grpo\n  replay: {enabled: true, k: 4}\n  mask_truncated: true\n")
    written = load_config(recipe).method
    assert (written.name, written.replay.enabled, written.replay.k, written.mask_truncated) == ("grpo", True, 4, True)
    named = load_config(recipe, ["method=grpo"]).method
    assert (named.replay.enabled, named.replay.k, named.mask_truncated) == (False, 4, False)
    later = load_config(recipe, ["method=grpo", "method.replay=on", "method.replay.k=2"]).method
    assert (later.replay.enabled, later.replay.k) == (True, 2)
    assert not load_config(recipe, ["method.replay.k=2", "method.replay=on", "method=grpo"]).method.replay.enabled


def test_an_objective_named_over_a_whole_config_is_that_objective(tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text(describe(load_config(None, ["method=dapo", "method.objective.kl=0.1"])))
    for override in ("method.objective=gspo", "method.objective.name=gspo"):
        named = load_config(recipe, [override]).method
        assert named.name == "dapo"
        assert named.objective == ObjectiveSettings.model_validate({"name": "gspo", "kl": 0.1})
    recipe.write_text("method: dapo\n")
    assert load_config(recipe, ["method.objective=gspo"]).method.objective.ratio == "sequence"


def test_the_documentation_lists_what_a_method_governs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    paragraph = text.partition("A method governs")[2].partition("\n\n")[0]
    assert re.findall(r"`([a-z_.]+)`", paragraph) == list(GOVERNED)
    for name in METHODS:
        assert f"| `{name}` |" in text, name


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
