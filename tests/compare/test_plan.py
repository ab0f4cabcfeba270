"""What a comparison may be: variants, equal settings, and which changes of a begun one are refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from r3.commands.compare import add_arguments
from r3.compare.plan import Plan, make_plan, parse_variant, save_plan, undeclared
from r3.config import load_config
from r3.config_text import describe
from r3.errors import ConfigError


def plan(**changes: Any) -> Plan:
    settings = {"methods": ["grpo", "r3"], "variants": [], "seeds": range(2), "tokens": 1_000, "evaluations": 4}
    overrides = changes.pop("overrides", ["train.learning_rate=1e-3"])
    return make_plan(None, overrides, **{**settings, "baseline": None, **changes})


def test_all_cells_of_a_plan_differ_in_the_method_and_the_seed_alone() -> None:
    made = plan(variants=["young=r3,method.replay.max_age=8,method.advantage.cap=2"])
    configs = {variant.name: made.config(variant).model_dump() for variant, _ in made.cells}
    assert list(configs) == ["grpo", "r3", "young"]
    assert {name: config["method"]["replay"]["max_age"] for name, config in configs.items()} == {
        "grpo": None, "r3": None, "young": 8,
    }  # fmt: skip
    rest = [{key: value for key, value in config.items() if key != "method"} for config in configs.values()]
    assert rest[0] == rest[1] == rest[2]
    assert rest[0]["train"]["tokens"] == 1_000
    assert rest[0]["evaluate"]["every_tokens"] == 250
    assert [seed for _, seed in made.cells] == [0, 0, 0, 1, 1, 1]


def test_a_variant_may_have_a_learning_rate_that_was_tuned_for_it(tmp_path: Path) -> None:
    made = plan(methods=["grpo"], variants=["reinforce++=reinforce++,train.learning_rate=3e-4", "r3=r3"])
    rates = {variant.name: made.config(variant).train.learning_rate for variant in made.variants}
    assert rates == {"grpo": 1e-3, "reinforce++": 3e-4, "r3": 1e-3}
    saved = save_plan(made, tmp_path)
    assert saved["common"]["train"]["learning_rate"] == 1e-3
    assert {name: variant.get("train.learning_rate") for name, variant in saved["variants"].items()} == {
        "grpo": None, "reinforce++": 3e-4, "r3": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"reinforce\+\+: train.learning_rate 0.0003 → 0.01"):
        save_plan(plan(methods=[], variants=["reinforce++=reinforce++,train.learning_rate=1e-2"]), tmp_path)
    assert save_plan(plan(methods=[], variants=["reinforce++=reinforce++,train.learning_rate=3e-4"]), tmp_path)


def test_variants_of_a_whole_config_are_those_methods(tmp_path: Path) -> None:
    """A printed config names every mechanism; its tuning is shared, its mechanisms are the variants' own."""
    recipe = tmp_path / "my.yaml"
    recipe.write_text(describe(load_config(None, ["method.reflection.give_up_after=8"])))
    made = make_plan(
        str(recipe),
        ["method.mask_truncated=false", "method.advantage.cap=2"],
        methods=["grpo", "r3", "r3-no-replay", "dapo"],
        variants=["more=grpo,method.replay=on"],
        seeds=range(1),
        tokens=100,
        evaluations=1,
        baseline=None,
    )
    methods = {variant.name: made.config(variant).method for variant in made.variants}
    on = {
        name: [part for part in ("replay", "reflection", "ranking", "resample") if getattr(method, part).enabled]
        for name, method in methods.items()
    }
    assert on == {
        "grpo": [],
        "r3": ["replay", "reflection", "ranking"],
        "r3-no-replay": ["reflection", "ranking"],
        "dapo": ["resample"],
        "more": ["replay"],
    }
    assert all(method.reflection.give_up_after == 8 for method in methods.values())
    assert all(method.advantage.cap == 2 for method in methods.values())


def test_what_is_set_for_all_lies_over_every_method() -> None:
    made = plan(overrides=["method.replay=off", "reward.length_bonus=true"], methods=["grpo", "r3"])
    assert not any(made.config(variant).method.replay.enabled for variant in made.variants)
    assert all(made.config(variant).reward.length_bonus for variant in made.variants)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methods": ["gpro"]}, "no method 'gpro'; there are grpo, dapo"),
        ({"methods": []}, "nothing to compare"),
        ({"overrides": ["method=grpo"]}, "name methods with --methods or --variant"),
        ({"baseline": "dapo"}, "--baseline dapo is none of the variants: grpo, r3"),
        ({"variants": ["r3=r3"]}, "two variants are called 'r3'"),
        ({"variants": ["fast=r3,train.warmup_updates=1"]}, "in method.*, buffer.* and train.learning_rate alone"),
        ({"variants": ["a=r3,train.learning_rate=1e-3"]}, "r3 and a resolve to the same settings"),
        ({"variants": ["nothing"]}, "--variant is written name=preset,key=value"),
        ({"variants": ["x=r3,method.replay.kk=1"]}, "did you mean method.replay.k"),
        ({"variants": ["twin=r3"]}, "r3 and twin resolve to the same settings"),
        ({"variants": ["a=dapo,method.replay.k=3", "b=dapo,method.replay.k=3"]}, "a and b resolve to the same"),
        ({"overrides": ["task.heldout=0"]}, "keep some problems apart"),
        ({"overrides": ["train.decay=cosine"]}, "set train.decay=constant"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(**change)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("text", "seeds"), [("1", [0]), ("3", [0, 1, 2]), ("4-6", [4, 5, 6]), ("7-7", [7])])
def test_seeds_are_a_number_of_them_or_a_range(text: str, seeds: list[int]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert list(parser.parse_args(["--seeds", text]).seeds) == seeds


def test_a_plan_knows_which_seeds_were_looked_at(tmp_path: Path) -> None:
    assert undeclared(plan(seeds=range(4)), tmp_path / "new") == []
    raw = tmp_path / "tried" / "raw"
    save_plan(plan(looked_at=range(2)), raw.parent)
    (raw / "grpo-seed3.json").touch()
    (raw / "grpo-seed4.json").touch()
    (note,) = undeclared(plan(seeds=range(6)), tmp_path / "new")  # beside it, with the same task
    assert "tried has results for seeds 3 to 4 of this task already" in note
    assert undeclared(plan(seeds=range(6), looked_at=range(5)), tmp_path / "new") == []
    assert undeclared(plan(seeds=range(3)), tmp_path / "new") == []
    assert undeclared(plan(seeds=range(6), overrides=["task.size=32"]), tmp_path / "new") == []
    assert save_plan(plan(looked_at=[3, 4]), raw.parent)["looked_at"] == [0, 1, 3, 4]


@pytest.mark.parametrize("text", ["0", "-1", "5-4", "4-", "a-b", "x"])
def test_seeds_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as refusal:
        parser.parse_args([f"--seeds={text}"])
    assert refusal.value.code == 2
    assert "--seeds" in capsys.readouterr().err.splitlines()[-1]


def test_values_with_commas_stay_whole() -> None:
    made = parse_variant("x=r3,method.reflection.guidance=try, again,method.replay.k=4")
    assert made.overrides == ("method=r3", "method.reflection.guidance=try, again", "method.replay.k=4")


def test_settings_that_an_older_version_did_not_have_change_nothing_while_they_are_off(tmp_path: Path) -> None:
    save_plan(plan(methods=["grpo", "exgrpo"]), tmp_path)
    path = tmp_path / "raw" / "plan.json"
    older = json.loads(path.read_text())
    for variant in older["variants"].values():
        del variant["method"]["revisit"], variant["method"]["resample"]["fill"]
    del older["common"]["train"]["max_bad_updates"]
    path.write_text(json.dumps(older))
    assert save_plan(plan(methods=["grpo"]), tmp_path)
    path.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"exgrpo: method\.revisit None →"):  # which has it on
        save_plan(plan(methods=["exgrpo"]), tmp_path)


def test_seeds_and_variants_may_join_and_nothing_else_may_change(tmp_path: Path) -> None:
    save_plan(plan(seeds=range(3)), tmp_path)
    save_plan(plan(methods=["dapo"], seeds=[1, 5], overrides=["train.learning_rate=1e-3", "run.threads=1"]), tmp_path)
    saved = json.loads((tmp_path / "raw" / "plan.json").read_text())
    assert list(saved["variants"]) == ["grpo", "r3", "dapo"]
    assert saved["seeds"] == [0, 1, 2, 5]
    for change, said in (
        ({"tokens": 2_000}, "tokens 1000 → 2000"),
        ({"overrides": []}, "train.learning_rate 0.001 → 0.0002"),
        ({"overrides": ["train.learning_rate=1e-3", "method.replay.k=3"]}, "grpo: method.replay.k 2 → 3"),
    ):
        with pytest.raises(ConfigError) as refusal:
            save_plan(plan(**change), tmp_path)
        assert said in str(refusal.value)
        assert "choose another --out" in str(refusal.value)
    assert json.loads((tmp_path / "raw" / "plan.json").read_text()) == saved


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("train.steps=50", "--tokens"),
        ("train.epochs=2", "--tokens"),
        ("train.tokens=5000", "--tokens"),
        ("evaluate.every_tokens=10", "--evaluations"),
        ("run.seed=3", "--seeds"),
        ("run.dir=mine", "--out"),
    ],
)
def test_what_the_plan_would_replace_is_refused(override: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{override} would not act: {option} says that for every cell"):
        plan(overrides=[override])
