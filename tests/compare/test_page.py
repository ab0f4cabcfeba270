"""The report's HTML page in a real Chromium: light and dark, on a desk and on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3.cli import main
from r3.compare.report import PAINTS
from r3.evaluate.curves import COLOURS
from tests.view.browser import Page, browser, page

__all__ = ["browser", "page"]

RAW = Path(__file__).parents[2] / "docs" / "results" / "raw" / "embedded-groups-of-four.json"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a comparison that was run, made again from its raw files."""
    out = tmp_path_factory.mktemp("compare")
    (out / "raw").mkdir()
    found = json.loads(RAW.read_text())
    (out / "raw" / "plan.json").write_text(json.dumps(found["plan"]))
    for cell in found["cells"]:
        (out / "raw" / f"{cell['variant']}-seed{cell['seed']}.json").write_text(json.dumps(cell))
    assert main(["compare", "--report-only", str(out)]) == 0
    return (out / "report.html").as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(report: str, page: Page, scheme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    page.emulate_media(color_scheme=scheme)
    page.goto(report)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.locator("figure svg").count() > 3
    for box in [page.locator("figure svg").nth(i).bounding_box() for i in range(4)]:
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    scrolled = page.evaluate("() => [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > 390).length")
    assert scrolled  # wide tables scroll by themselves


def test_text_and_lines_can_be_read_in_light_and_dark(report: str, page: Page) -> None:
    """Contrast against what lies behind: 4.5 for text, 2 for lines, by the formula of WCAG 2."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(report)
        paper = luminance(paint(page, "figure", "backgroundColor"))
        assert (paper > 0.5) == (scheme == "light")
        assert (luminance(paint(page, "body", "backgroundColor")) > 0.5) == (scheme == "light")
        for words in ("figure text", "td", "th", "pre"):
            assert contrast(luminance(paint(page, words, "fill" if "text" in words else "color")), paper) > 4.5, words
        lines = page.evaluate(
            "s => [...document.querySelectorAll(s)].map(e => getComputedStyle(e).stroke)",
            arg="[id^=axes] > [id^=line2d] > path",
        )
        assert lines
        assert all(contrast(luminance(line), paper) > 2 for line in lines)


def test_every_colour_of_the_figures_is_the_pages_to_set() -> None:
    assert {colour.lower() for colour in COLOURS} <= PAINTS.keys()


def paint(page: Page, selector: str, name: str) -> str:
    return str(page.evaluate("([s, n]) => getComputedStyle(document.querySelector(s))[n]", [selector, name]))


def luminance(colour: str) -> float:
    red, green, blue = (float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
