"""docs/results.md and docs/pilots.md are what their raw files say, in the tables and in the words."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from r3.compare.analysis import Comparison
from r3.compare.records import read_records
from r3.compare.tables import times

DOCS = Path(__file__).parents[2] / "docs"
INTERVAL = re.compile(r"(-?)(\d+\.\d+)×? \[(-?)(\d+\.\d+), (?:(-?)(\d+\.\d+)|not reached)\]")
OF_SOME_SEEDS = {"embedded-harder": range(8, 16), "embedded-harder-earlier": range(5)}
"""Comparisons whose words also give the ratios over some of their seeds: the fresh ones, or those first looked at."""


@cache
def make_results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def page(name: str) -> str:
    return str(make_results().page(pilots=name == "pilots.md"))


@pytest.mark.parametrize("name", ["results.md", "pilots.md"])
def test_a_page_is_made_from_its_raw_files(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == page(name), "run `make results`"


def test_what_a_repository_carries_of_a_comparison_is_small() -> None:
    for folder in (*make_results().folders(), *make_results().folders(pilots=True)):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert size < 2_000_000, f"{folder} is too large for a repository"


def test_links_of_the_overviews_lead_to_headings() -> None:
    for name in ("results.md", "pilots.md"):
        lines = page(name).splitlines()
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        links = [line.split("](#")[1].split(")")[0] for line in lines if line.startswith("| [")]
        assert len(links) > 5
        assert set(links) <= {make_results()._anchor(heading) for heading in headings}
        assert len(set(headings)) == len(headings)


def test_every_interval_in_the_words_is_one_of_the_tables() -> None:
    """Words are typed by hand, so what they quote is looked up; `b − a` may be told as `a − b`."""
    tables = [line for name in ("results.md", "pilots.md") for line in page(name).splitlines() if line.startswith("|")]
    known = {_bare(found) for found in INTERVAL.finditer("\n".join([*tables, *_ratios_of_some_seeds()]))}
    written = [
        *DOCS.glob("results/*/about.md"),
        *DOCS.glob("results/*.md"),
        *DOCS.glob("*.md"),
        DOCS.parent / "README.md",
    ]
    quoted = [(path, found) for path in written for found in INTERVAL.finditer(_words(path))]
    assert len(quoted) > 20
    strange = [f"{path.parent.name}/{path.name}: {found[0]}" for path, found in quoted if _bare(found) not in known]
    assert not strange, "in no table: " + "; ".join(strange)


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


def _ratios_of_some_seeds() -> list[str]:
    found = []
    for name, seeds in OF_SOME_SEEDS.items():
        plan, records = read_records(DOCS / "results" / name)
        some = Comparison({**plan, "seeds": list(seeds)}, [record for record in records if record.seed in seeds])
        found += [times(some.token_ratio("r3", other).ratio) for other in ("grpo", "dapo")]
    return found
