"""The settings of a run: what config.yaml says, and what of it differs from the defaults.

Covers r3.view.pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.config import Config, dump, validate
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.train.tiny import run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings_of(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    answer = Api(open_runs([folder])).answer("settings", {})
    json.dumps(answer, allow_nan=False)
    return {row["key"]: row for section in answer["sections"] for row in section["settings"]}, answer["problems"]


def changed(folder: Path) -> set[str]:
    return {key for key, row in settings_of(folder)[0].items() if row.get("changed")}


def saved(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(text)
    return folder


def test_the_page_marks_what_differs_from_the_defaults(finished: Path, serve: Serve, page: Page) -> None:
    given = dict(flat(yaml.safe_load((finished / "config.yaml").read_text())))
    defaults = dict(flat(yaml.safe_load(dump(validate({"method": given["method.name"]})))))  # the preset's own
    differ = {key for key, value in given.items() if not key.startswith("task.") and value != defaults[key]}
    differ |= {"method.name"}
    visit(page, serve(finished), "#/0/settings")
    assert page.locator("tr[data-key]").count() == len(given)
    page.get_by_role("button", name="Changed").click()
    marked = page.locator("tr.changed")
    assert marked.count() == page.locator("tr[data-key]").count()
    keys = {str(marked.nth(i).get_attribute("data-key")) for i in range(marked.count())}
    assert {key for key in keys if not key.startswith("task.")} == differ
    assert {"task.name", "task.path", "task.verifier", "task.heldout"} <= keys
    row = page.locator("tr[data-key='rollout.group_size']")
    assert row.locator("pre").all_inner_texts() == ["4", "8"]
    assert page.locator("tr[data-key='task.path'] .default").inner_text() == "none"  # it has no default
    page.keyboard.press("/")
    page.keyboard.type("LEARNING_RATE")
    page.wait_for_function("() => document.querySelectorAll('tr[data-key]').length === 1")
    assert "\nr3 train --quiet" in page.locator(".start").inner_text()


def test_a_preset_that_is_named_is_the_default_of_what_it_sets(tmp_path: Path) -> None:
    grpo = saved(tmp_path / "grpo", dump(validate({"method": "grpo"})))
    assert changed(grpo) == {"method.name"}
    other = saved(tmp_path / "other", dump(validate({"method": {"name": "grpo", "replay": "on"}})))
    assert changed(other) == {"method.name", "method.replay.enabled"}


def test_settings_of_another_version_or_trainer_are_shown_as_they_are(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump(Config()))
    tree["rollout"] |= {"group_size": 5, "of_tomorrow": 1}
    tree["train"]["epochs"] = 9
    tree["engine"] = {"name": "another", "options": {"a": float("inf"), "b": None}}
    run = saved(tmp_path / "run", yaml.safe_dump(tree))
    (run / "run.json").write_text(json.dumps({"format": 1, "defaults": {"engine": {"name": "another", "options": {}}}}))
    rows, problems = settings_of(run)
    assert {key for key, row in rows.items() if row.get("changed")} == {"train.epochs"}
    assert rows["rollout.group_size"] == {"key": "rollout.group_size", "value": 5}
    assert len(problems) == 1
    assert "rollout.of_tomorrow" in problems[0]
    assert rows["engine.name"]["changed"] is False
    assert rows["engine.options.a"] == {"key": "engine.options.a", "value": "inf"}


@pytest.mark.parametrize("text", ["", "- 1", "{", "a: &a [*a]", "a: &a [1,1,1]\nb: [*a]\n2: 3\nmodel: 4\ntask: null"])
def test_no_config_stops_the_page(tmp_path: Path, text: str) -> None:
    settings_of(saved(tmp_path / "run", text))


def test_an_export_has_the_settings(finished: Path, tmp_path: Path, page: Page) -> None:
    run_r3("view", finished, "--export", tmp_path / "report.html", "--steps", "0")
    visit(page, (tmp_path / "report.html").as_uri(), "#/0/settings")
    assert page.locator("tr[data-key='rollout.group_size'].changed").count() == 1
