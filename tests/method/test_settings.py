"""Presets and overrides: what a person writes is what the method does.

Covers r3.method.mechanisms, r3.method.presets.
"""

from __future__ import annotations

import dataclasses
import re
from functools import reduce
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from r3.method.presets import (
    BY_EVIDENCE,
    GOVERNED,
    LETTER,
    METHODS,
    OBJECTIVES,
    MethodName,
    ObjectiveName,
    governed,
    reset,
)
from r3.method.settings import MethodSettings, ObjectiveSettings


def test_presets_are_settings_of_one_tree() -> None:
    for name in METHODS:
        assert MethodSettings(name=name).name == name
    assert MethodSettings.model_validate("grpo") == MethodSettings(name="grpo")
    dapo = MethodSettings(name="dapo")
    assert (dapo.objective.clip_high, dapo.objective.normalise, dapo.resample.enabled) == (0.28, "token", True)


def test_overrides_lie_over_the_preset() -> None:
    settings = MethodSettings.model_validate({"name": "grpo", "replay": {"k": 5}, "objective": {"clip_high": 0.3}})
    assert settings.replay.k == 5
    assert not settings.replay.enabled
    assert settings.objective.clip_high == 0.3
    assert MethodSettings.model_validate({"name": "dapo", "objective": {"kl": 0.1}}).objective.clip_high == 0.28
    assert MethodSettings.model_validate({"name": "dapo", "objective": "gspo"}).objective.ratio == "sequence"
    assert not MethodSettings.model_validate({"replay": "off"}).replay.enabled
    assert MethodSettings.model_validate({"name": "grpo", "ranking": "on"}).ranking.enabled


def test_a_dump_reads_back_to_the_same_settings() -> None:
    for name in METHODS:
        settings = MethodSettings(name=name)
        assert MethodSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"name": "ppo"}, "name"),
        ({"repaly": {}}, "repaly"),
        ({"replay": {"k": 0}}, "replay"),
        ({"ranking": {"max_reward": 1.0}}, "max_reward"),
        ({"reflection": {"tau": 1.5}}, "tau"),
        ({"objective": {"ratio_gate": 0.5}}, "ratio_gate"),
        ({"mask_truncated": True}, "ranking=off or mask_truncated=false"),
    ],
)
def test_bad_settings_are_named(given: dict[str, object], where: str) -> None:
    with pytest.raises(ValidationError, match=where):
        MethodSettings.model_validate(given)


def test_settings_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValidationError):
        ObjectiveSettings().kl = 1.0  # type: ignore[misc]


def test_every_setting_has_a_help_text() -> None:
    for part in [*MethodSettings.model_fields.values()]:
        sub = part.annotation
        for name, field in getattr(sub, "model_fields", {}).items():
            assert field.description, f"{sub}.{name} has no docstring"


# What a preset sets is governed: it is reset where another method is named.


def test_every_name_has_a_preset_and_every_preset_says_where_it_comes_from() -> None:
    assert set(METHODS) == set(get_args(MethodName))
    assert set(OBJECTIVES) == set(get_args(ObjectiveName))
    for name, preset in METHODS.items():
        assert re.search(r"arXiv \d|\w/\w", preset.source), name  # a paper, or code
        assert "\n" not in preset.summary + preset.needs


@pytest.mark.parametrize("before", METHODS)
def test_a_method_named_over_a_whole_config_of_another_is_that_method(before: MethodName) -> None:
    """What a preset sets is governed: else naming another method would leave it standing."""
    for name in METHODS:
        whole = MethodSettings(name=before).model_dump(mode="json")
        reset(whole, name)
        assert MethodSettings.model_validate(whole) == MethodSettings(name=name), name


def test_what_only_a_preset_sets_stays_until_it_is_named() -> None:
    mine = {"name": "r3", "objective": {"correction": "stopped"}, "replay": {"k": 5}}
    for name, expected in (("grpo", ("stopped", 5)), ("rlep", ("recomputed", 2)), ("repo", ("naive", 8))):
        given: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in mine.items()}
        reset(given, name)
        settings = MethodSettings.model_validate(given)
        assert (settings.objective.correction, settings.replay.k) == expected


R3_FAMILY = [name for name in METHODS if name.startswith("r3")]
TURNED = {
    "replay": {"when": "solve_none", "failures": False, "k": 5},
    "reflection": {
        "train_as": "both",
        "window": 8,
        "when": "unsolved",
        "at_once": True,
        "budget": "shared",
        "max_share": 0.2,
        "min_lift": 2.0,
        "tau": 0.1,
        "from_epoch": 4,
        "give_up_after": 8,
        "max_prompt_tokens": 99,
    },
    "ranking": {"scope": "failed", "centred": True, "standardised": False, "alone": False, "max_reward": 0.2},
}


def turned_then(name: str) -> MethodSettings:
    given = {"name": "r3", **{section: dict(values) for section, values in TURNED.items()}}
    reset(given, name)
    return MethodSettings.model_validate(given)


def test_r3_paper_named_over_a_recipe_is_the_papers_letter_with_the_recipes_numbers() -> None:
    """Written out here from the paper, not read from the presets: whatever `r3` may become, this stays."""
    method = turned_then("r3-paper")
    replay, reflection, ranking = method.replay, method.reflection, method.ranking
    assert (replay.enabled, reflection.enabled, ranking.enabled) == (True, True, True)
    assert (replay.when, replay.mode, replay.baseline, replay.failures) == ("homogeneous", "join", "joint", True)
    assert (reflection.train_as, reflection.window, reflection.when) == ("reflection", None, "hard")
    assert (reflection.at_once, reflection.budget) == (False, "extra")
    assert (reflection.max_share, reflection.min_lift) == (1.0, 0.0)
    assert (ranking.scope, ranking.centred, ranking.standardised, ranking.alone) == ("truncated", False, True, True)
    assert (replay.k, reflection.tau, reflection.from_epoch, ranking.max_reward) == (5, 0.1, 4, 0.2)
    assert (reflection.give_up_after, reflection.max_prompt_tokens) == (8, 99)


@pytest.mark.parametrize("name", R3_FAMILY)
def test_r3_and_its_ablations_govern_the_same_switches(name: str) -> None:
    switches = {f"{section}.{key}" for section, keys in LETTER.items() for key in keys}
    assert switches <= set(governed(name))
    method = turned_then(name)
    for section, keys in LETTER.items():
        expected = {**keys, **({} if name == "r3-paper" else BY_EVIDENCE[section])}
        assert {key: getattr(getattr(method, section), key) for key in keys} == expected, section
        assert set(BY_EVIDENCE[section]) <= set(keys), "what r3 sets must be in LETTER, or r3-paper would not reset it"


def test_r3_paper_does_not_move_when_r3_does(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {**METHODS["r3"].settings, "reflection": {**LETTER["reflection"], "budget": "shared", "at_once": True}}
    monkeypatch.setitem(METHODS, "r3", dataclasses.replace(METHODS["r3"], settings=moved))  # type: ignore[arg-type]
    assert MethodSettings(name="r3").reflection.budget == "shared"
    assert turned_then("r3").reflection.at_once
    assert MethodSettings(name="r3-paper").reflection.budget == "extra"
    assert not turned_then("r3-paper").reflection.at_once


def test_what_an_objective_sets_is_governed() -> None:
    for name, fields in OBJECTIVES.items():
        assert {f"objective.{field}" for field in fields} <= set(GOVERNED), name
    for key in GOVERNED:
        assert reduce(getattr, key.split("."), MethodSettings()) is not None or key == "objective.dual_clip"


def test_an_objective_that_is_named_is_that_objective() -> None:
    assert MethodSettings.model_validate({"name": "maxrl", "objective": "grpo"}).objective == ObjectiveSettings()
    dapo = MethodSettings.model_validate({"name": "dr_grpo", "objective": {"name": "dapo", "kl": 0.1}})
    assert (dapo.advantage.scale, dapo.objective.normalise, dapo.objective.kl) == ("none", "token", 0.1)
