"""Presets and overrides: what a person writes is what the method does. Covers r3.method.mechanisms."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from r3.method.presets import METHODS
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
