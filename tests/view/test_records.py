"""What a run holds for the pages besides metrics: its answers, its settings, what `r3 probe` found; a run of TRL's.

Covers r3.view.steps, r3.view.pages, r3.integrations.common.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from r3 import SampleBuffer
from r3.cli import main
from r3.config import Config, dump, validate
from r3.run import RunFiles
from r3.view.api import Api
from r3.view.pages import open_all
from r3.view.runs import open_runs
from r3.view.steps import group_view, peaks
from tests.train.tiny import overrides, run_r3
from tests.view.conftest import Page, Serve, visit


def rows(run: Path) -> Iterator[dict[str, Any]]:
    rollouts = RunFiles(run).rollouts
    for step in rollouts.steps():
        yield from rollouts.read(step)


def test_ids_lead_to_the_same_sample_in_the_buffer(finished: Path) -> None:
    with SampleBuffer.open_reader(finished / "buffer.sqlite") as buffer:
        for row in rows(finished):
            found = buffer.find([row["id"]])
            assert found[row["id"]].tokens.tolist() == row["tokens"]
            if "attempt" in row:
                shown = buffer.find([row["shown"]])[row["shown"]]
                assert (shown.step, shown.verdict) == (row["attempt"]["step"], row["attempt"]["verdict"])


def test_ratios_are_those_of_the_update(finished: Path) -> None:
    """On-policy samples have 1 but for rounding; replayed ones do not; samples that were not trained on have none."""
    aged = []
    for row in rows(finished):
        if row["advantage"] == 0 or row["drawn_in"] != row["context"]:
            assert isinstance(row["ratios"], float), "null comes back as NaN"
            continue
        assert len(row["ratios"]) == len(row["tokens"])
        if row["origin"] == "fresh":
            assert row["ratios"] == pytest.approx([1.0] * len(row["tokens"]), abs=5e-3)
        else:
            aged += row["ratios"]
    assert max(abs(math.log(ratio)) for ratio in aged) > 0.005


def test_the_pages_ranking_is_the_reward_that_was_paid(finished: Path) -> None:
    run = open_runs([finished])[0]
    seen = 0
    for step in run.tables.steps():
        for number in range(4):  # the plain groups
            ranking = group_view(run, step, number)["ranking"]
            ranked = [point for point in ranking["points"] if point["rank"] is not None]
            seen += len(ranked)
            for one in ranked:
                for other in ranked:
                    if one["score"] > other["score"]:
                        assert one["reward"] > other["reward"]
                assert one["score"] == sum(i == one["sample"] for i, _ in ranking["beats"])
    assert seen


def test_peaks_are_the_most_undecided_tokens() -> None:
    assert peaks([0.1, 3.0, 0.2, 2.0, 0.0], 0.4) == [1, 3]
    assert peaks([1.0], 0.2) == [0]


# The settings of a run: what config.yaml says, and what of it differs from the defaults.


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


# What `r3 probe` found, in the browser: alone, beside runs, in an export, and damaged.


@pytest.fixture(scope="module")
def probe(model: Path) -> Path:
    """The folder of a real probe of the tiny model."""
    assert main(["probe", *overrides(model), "--tokens", "4000", "--out", str(model / "probe")]) == 0
    return model / "probe"


def content(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "probe.json").read_text()))


def test_a_probe_is_a_page_of_its_own(probe: Path, serve: Serve, page: Page) -> None:
    report = content(probe)
    findings = report["findings"]
    visit(page, serve(probe), "#/0/probe")
    assert page.locator("nav a").all_inner_texts() == ["Probe"]
    for advice in report["advice"]:
        row = page.locator(f"tr[data-about='{advice['about']}']")
        assert advice["pays"] in row.inner_text()
        assert advice["reason"] in row.inner_text()
    shares = page.locator(".twos .card").first.inner_text()
    for estimate in (*findings["solve"].values(), *findings["pass_at"].values(), findings["truncated"]):
        assert f"{100 * estimate['value']:.1f} %" in shares
    lift = page.locator(".lift").inner_text()
    for right in findings["lift"]["right"]:
        assert f"{right} of {findings['lift']['answers']}" in lift
    assert "ranking:" in page.locator(".follow pre").inner_text()
    assert f"r3 train {probe}/recipe.yaml" in page.locator(".follow").inner_text()
    for key in "1j":  # there is no run to look at
        page.keyboard.press(key)
    assert page.locator("[data-page=probe]").count() == 1
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_probes_stand_beside_the_runs_of_a_folder(
    finished: Path, probe: Path, tmp_path: Path, serve: Serve, page: Page
) -> None:
    shutil.copytree(finished, tmp_path / "all" / "run")
    for name in ("before", "longer"):
        shutil.copytree(probe, tmp_path / "all" / name)
    visit(page, serve(tmp_path / "all"))
    page.keyboard.press("6")
    page.wait_for_selector("[data-page=probe] .tiles")
    page.locator("main select").select_option("1")
    page.wait_for_function("() => location.hash === '#/0/probe/1'")
    page.keyboard.press("1")
    page.wait_for_selector("[data-page=overview] .chart")


def test_an_export_has_the_probe(probe: Path, tmp_path: Path, page: Page) -> None:
    said = run_r3("view", probe / "probe.json", "--export", tmp_path / "report.html").stdout
    assert "0 run(s), 1 probe(s)" in said
    visit(page, (tmp_path / "report.html").as_uri(), "#/0/probe")
    assert page.locator(".advice tr").count() >= 4


def test_an_infinite_ratio_is_no_trouble(probe: Path, tmp_path: Path, serve: Serve, page: Page) -> None:
    """Where no plain answer is right, the interval of the ratio has no end, which JSON cannot say."""
    report = content(probe)
    report["findings"]["lift"]["ratio"] = {"value": 3.0, "low": 1.5, "high": float("inf")}
    (tmp_path / "probe.json").write_text(json.dumps(report))
    visit(page, serve(tmp_path), "#/0/probe")
    assert "(1.5× … ∞)" in page.locator(".lift").inner_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"findings": {}}', "\x00"])
def test_a_damaged_probe_is_told_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "probe.json").write_text(text)
    runs, probes = open_all([tmp_path])
    answer = Api(runs, probes).answer("probe", {"probe": "0"})
    assert str(tmp_path / "probe.json") in answer["problem"]


def test_a_folder_without_either_is_refused(tmp_path: Path) -> None:
    refused = run_r3("view", tmp_path, check=False)
    assert refused.returncode == 2
    assert "nor has it runs" in refused.stderr


# A run of TRL's trainer with R³ in it: its folder opens like one of r3's own.


def trl() -> ModuleType:
    """The tests' trainer inside TRL, where TRL is installed."""
    pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
    from tests.integrations import trl_tiny

    return trl_tiny


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("default")
def test_a_run_of_trl_opens_in_the_viewer(tmp_path: Path, serve: Serve, page: Page) -> None:
    trl_tiny = trl()
    trainer = trl_tiny.make(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    run = tmp_path / "out" / "r3_run"
    steps = lines(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["update/loss"] for line in steps] == pytest.approx(trl_tiny.losses(trainer))
    assert [line["groups/plain"] for line in steps] == trl_tiny.logged(trainer, "r3/groups/plain")
    reflected = next(
        (step, i, about)
        for step in RunFiles(run).rollouts.steps()
        for i, about in enumerate(RunFiles(run).rollouts.contents(step).summaries)  # type: ignore[union-attr]
        if about["context"] == "reflection"
    )
    url = serve(tmp_path / "out")
    visit(page, url)
    assert "finished · step 6 of 6" in page.locator(".status").inner_text()
    assert page.locator("#problems p").count() == 0
    assert page.locator(".chart", has_text="Loss").locator("canvas").count() == 1
    step, number, about = reflected
    visit(page, url, f"#/0/group/{step}/{number}/0")
    assert f"attempt #{about['shown']}" in page.inner_text("main")
    visit(page, url, "#/0/buffer")
    assert page.locator(".tile").first.inner_text().startswith("samples")
    visit(page, url, "#/0/settings")
    assert page.locator("tr.changed[data-key='trl.num_generations']").count() == 1
    assert page.locator("tr.changed[data-key='method.ranking.peak_fraction']").count() == 1
    # Going on from the second step takes the record back with it.
    resumed = trl_tiny.make(tmp_path, save_strategy="steps", save_steps=2, num_train_epochs=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    again = lines(run)
    assert [line["step"] for line in again] == list(range(1, 9))
    assert [line["reward"] for line in again[:6]] == pytest.approx([line["reward"] for line in steps])


@pytest.mark.filterwarnings("default")
def test_a_new_run_in_the_folder_begins_a_new_record(tmp_path: Path) -> None:
    make = trl().make
    make(tmp_path, max_steps=2).train()
    make(tmp_path, max_steps=1, r3_rollouts_every=0).train()
    run = tmp_path / "out" / "r3_run"
    assert [line["step"] for line in lines(run)] == [1]
    assert RunFiles(run).rollouts.steps() == []
    assert yaml.safe_load((run / "config.yaml").read_text())["trl"]["r3_rollouts_every"] == 0
