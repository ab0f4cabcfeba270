"""One config tree: defaults, recipe, overrides; what is printed reads back. Every recipe of the repository is a valid
config, and every command of recipes/evidence.py a valid one.

Covers r3.config_text, r3.settings, r3.models.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from r3.cli import _parsed, main
from r3.compare.plan import make_plan
from r3.config import Config, changes, dump, load_config, read_recipe, validate
from r3.config_text import describe
from r3.errors import ConfigError
from r3.method.presets import GOVERNED, METHODS
from r3.method.settings import ObjectiveSettings
from r3.models import Shape

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


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


def printed(*arguments: str) -> str:
    with redirect_stdout(StringIO()) as out:
        assert main(["train", *arguments, "--print-config"]) == 0
    return out.getvalue()


@cache
def tuned(method: str) -> str:
    """The whole config of a method, with numbers of one's own."""
    text = printed(f"method={method}", "method.replay.max_age=7", "method.reflection.give_up_after=3", "train.steps=5")
    assert validate(yaml.safe_load(text)).method.replay.max_age == 7
    return text


@pytest.mark.parametrize("before", METHODS)
def test_a_method_named_over_a_whole_config_is_that_method(before: str, tmp_path: Path) -> None:
    """`r3 train --print-config > my.yaml; r3 train my.yaml method=grpo`, for every pair of methods."""
    mine = tmp_path / "my.yaml"
    mine.write_text(tuned(before))
    for after in METHODS:
        assert printed(str(mine), f"method={after}") == tuned(after)
    names = list(METHODS)
    other = names[names.index(before) - 1]
    assert printed(str(mine), f"method.name={other}") == tuned(other)


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


# The recipes of the repository.


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    validate(read_recipe(recipe))


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
