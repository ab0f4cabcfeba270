"""The pages of results are what their raw files say, in tables and in words (tools/make_results.py), and fit a screen.

Covers r3.compare.report.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from r3.cli import main
from r3.compare.analysis import Comparison
from r3.compare.records import Record, condense, read_records
from r3.compare.report import PAINTS
from r3.evaluate.curves import COLOURS
from tests.view.conftest import Page, browser, page

__all__ = ["browser", "page"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INTERVAL = re.compile(r"(-?)(\d+\.\d+)×? \[(-?)(\d+\.\d+), (?:(-?)(\d+\.\d+)|not reached)\]")
LINES = {"results.md": 150, "pilots.md": 80, "arena.md": 300}  # three tables of two dozen methods


@cache
def make_results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "tools" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_results"] = module
    spec.loader.exec_module(module)
    return module


@cache
def pages() -> dict[Path, str]:
    return dict(make_results().pages())


@cache
def comparisons() -> dict[str, Comparison]:
    return dict(make_results().comparisons())


def collection(name: str) -> dict[str, Comparison]:
    return {key: comparison for key, (_, comparison) in make_results().collection(name).items()}


def test_pages_are_made_from_the_raw_files() -> None:
    made = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    assert not made, "run `make results`"
    there = set((DOCS / "results").glob("*.md"))
    assert there == {path for path in pages() if path.parent == DOCS / "results"}, "pages of no comparison"


def test_the_pages_to_read_first_are_short_and_their_links_lead_somewhere() -> None:
    for path, text in pages().items():
        assert len(text.splitlines()) <= LINES.get(path.name, 200), path
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path}: {target}"
    shown = {found for text in pages().values() for found in re.findall(r"([\w-]+\.svg)", text)}
    assert shown == {path.name for path in (DOCS / "results").glob("*.svg")}, "figures that no page shows"


@pytest.mark.parametrize("path", sorted((DOCS / "results" / "raw").glob("*.json")), ids=lambda path: path.stem)
def test_a_raw_file_is_small_and_the_same_bytes_when_written_again(path: Path, tmp_path: Path) -> None:
    many = path.stem.startswith("arena-") or path.stem in ("earlier", "pilots")  # of two dozen methods, of dozens
    assert path.stat().st_size < (1_000_000 if many else 600_000)
    if path.stem not in make_results().COLLECTIONS:
        condense(*read_records(path), tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_every_variant_has_a_command_and_every_comparison_the_commit_that_it_belongs_to() -> None:
    for name, c in {**comparisons(), **collection("pilots"), **collection("earlier")}.items():
        assert re.fullmatch(r"[0-9a-f]{7,}", c.plan["commit"]), name
        for part in (c, c.looked_at):
            for first, *_ in [] if part is None else [cells for cells in part.records.values() if cells]:
                said = shlex.split(first.command)
                assert said[:2] == ["r3", "train"], name
                assert {f"run.seed={first.seed}", f"train.tokens={c.plan['tokens']}"} <= set(said), name


def test_dapo_with_truncated_answers_masked_is_in_no_comparison_of_today_and_never_called_dapo() -> None:
    assert not any(c.masked(variant) for c in comparisons().values() for variant in c.names)
    labels = [c.label(name) for c in collection("earlier").values() for name in c.names if c.masked(name)]
    assert len(labels) > 8
    assert set(labels) == {"dapo (truncated masked)"}


def test_no_claim_is_made_where_every_seed_was_looked_at() -> None:
    assert not any(c.exploratory for c in (*comparisons().values(), *collection("earlier").values()))
    assert all(c.exploratory for c in collection("pilots").values())
    embedded = collection("earlier")["embedded"]
    assert embedded.seeds("r3") == [5, 6, 7, 8, 9]
    assert embedded.looked_at is not None
    assert embedded.looked_at.seeds("r3") == [0, 1, 2, 3, 4]


def test_every_interval_in_the_words_is_one_of_the_tables() -> None:
    """Words are typed by hand, so what they quote is looked up; `b − a` may be told as `a − b`."""
    tables = [line for text in pages().values() for line in text.splitlines() if line.startswith("|")]
    known = {_bare(found) for found in INTERVAL.finditer("\n".join(tables))}
    written = [*DOCS.glob("results/*.md"), *DOCS.glob("*.md"), ROOT / "README.md"]
    quoted = [(path, found) for path in written for found in INTERVAL.finditer(_words(path))]
    assert len(quoted) > 20
    strange = [f"{path.name}: {found[0]}" for path, found in quoted if _bare(found) not in known]
    assert not strange, "in no table: " + "; ".join(strange)


def test_ratios_that_no_table_has_are_quoted_as_they_are() -> None:
    entry = make_results().collection("earlier")["embedded"][0]
    every = Comparison({**entry["plan"], "looked_at": []}, [Record(**cell) for cell in entry["cells"]])
    assert every.token_ratio("r3", "grpo").ratio.value == pytest.approx(0.66, abs=0.005)


def test_levels_on_the_way_are_quoted_as_they_are() -> None:
    bounds = comparisons()["replay-bounds-lift"]
    assert bounds.grid[4] == 96_000
    levels = {name: 100 * bounds.curves(name, "pass@1")[:, :, 4].mean() for name in bounds.names}
    assert round(levels["r3"], 1) == 21.4
    assert round(levels["shaped"], 1) == 11.3
    assert all(levels["r3"] - level < 2.35 for name, level in levels.items() if name != "shaped")


def test_finals_that_the_words_single_out_are_those_of_the_runs() -> None:
    lift, rates = comparisons()["lift"], collection("pilots")["arena-rates-spelling"]
    assert sorted(_finals(lift, "r3"))[0] > 50
    assert sorted(map(round, _finals(lift, "grpo")))[:3] == [6, 11, 41]
    fifth = {name: 100 * lift.curves(name, "pass@1")[:, :, 4].mean() for name in ("r3", "r3-no-reflection", "grpo")}
    assert lift.grid[4] == 96_000
    assert [round(value, 1) for value in fifth.values()] == [21.4, 8.8, 8.1]
    assert round(100 * rates.final("grpo", "pass@1").value, 1) == 27.8


def _finals(c: Comparison, name: str) -> list[float]:
    return [100 * float(curve[:, -1].mean()) for curve in c.curves(name, "pass@1")]


def _words(path: Path) -> str:
    """A page without what programs printed, and without tables: those of other pages are of other things."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def _bare(found: re.Match[str]) -> tuple[float, frozenset[float | None]]:
    """A number with its interval, the same for a difference and its negative."""
    sign, value, low_sign, low, high_sign, high = found.groups()
    ends = [float((low_sign or "") + low), None if high is None else float((high_sign or "") + high)]
    flipped = -1 if sign else 1
    return float(value), frozenset(end if end is None else flipped * end for end in ends)


# The report's HTML page in a real Chromium: light and dark, on a desk and on a phone.


RAW = Path(__file__).parents[2] / "docs" / "results" / "raw" / "embedded-groups-of-four.json"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a comparison that was run, made again from its raw files."""
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
