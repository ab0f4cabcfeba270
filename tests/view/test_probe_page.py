"""What `r3 probe` found, in the browser: alone, beside runs, in an export, and damaged.

Covers r3.view.pages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from r3.view.api import Api
from r3.view.pages import open_all
from tests.train.tiny import overrides, run_r3
from tests.view.browser import Page, browser, page, visit
from tests.view.conftest import Serve

__all__ = ["browser", "page"]


@pytest.fixture(scope="module")
def probe(model: Path) -> Path:
    """The folder of a real probe of the tiny model."""
    run_r3("probe", *overrides(model), "--tokens", "4000", "--out", model / "probe")
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
