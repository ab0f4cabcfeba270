"""Write the generated parts of docs/results.md, docs/results/*.md and docs/pilots.md, and the figures, from raw files.

    python -m tools.make_results                    (make results)
    python -m tools.make_results add OUT NAME       condense the --out of an r3 compare into docs/results/raw/NAME.json

docs/results/raw/ has one file of raw numbers for each comparison, one for all comparisons of earlier versions and one
for all pilots. What was asked and what to make of it is written by hand into the pages, outside what the comments in
them mark as made here; no table is typed by hand, and a test looks up the intervals that the words name.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from r3.compare.analysis import Comparison
from r3.compare.plan import seed_list
from r3.compare.records import Record, condense, read_records
from r3.compare.report import draw_bands, figures_of, markdown, markdown_table
from r3.compare.tables import Table, percent, targets_of, times
from r3.evaluate.passk import Estimate
from tools import arena_page
from tools.arena_page import canvas
from tools.sentences import rewritten

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
MARK = (
    "<!-- What follows is made by tools/make_results.py from raw/{name}.json: edit above, then run `make results`. -->"
)
TABLE = "<!-- table -->", "<!-- end of table -->"
ORDER = (
    *(
        "lift",
        "lift-rates",
        "mechanisms",
        "embedded-groups-of-four",
        "embedded-harder",
        "truncation",
        "spelling-mechanisms",
    ),
    *("smollm2-lists", "replay-bounds-lift", "replay-bounds"),
)
"""The comparisons, the main ones first."""
COLLECTIONS = {"earlier": RESULTS / "earlier.md", "pilots": DOCS / "pilots.md"}
"""Raw files that hold many comparisons, and the pages that have a row for each."""
REFERENCES = ("grpo", "dapo")
SHOWN = 2.0
"""Where the axis of the overview ends: what lies beyond has an arrow."""
COLUMNS = 3
"""Panels of the curves, side by side."""
FEW = 4
"""Fewer seeds than this have no interval among the pilots: it would be as wide as the page."""


def comparisons() -> list[tuple[str, Comparison]]:
    """By name, in the order of the page; one that the order does not name comes last."""
    names = [path.stem for path in (RESULTS / "raw").glob("*.json")]
    names = [name for name in names if name not in COLLECTIONS and not name.startswith(arena_page.PREFIX)]
    names.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return [(name, Comparison.read(RESULTS / "raw" / f"{name}.json")) for name in names]


def collection(name: str) -> dict[str, tuple[dict[str, str], Comparison]]:
    """What each comparison of a collection was and what came of it, with its numbers, in the order of the page."""
    raw = json.loads((RESULTS / "raw" / f"{name}.json").read_bytes())
    return {
        name: (entry, Comparison(entry["plan"], [Record(**cell) for cell in entry["cells"]]))
        for name, entry in raw.items()
    }


def pages() -> dict[Path, str]:
    """Every page, with what is made of the raw files put into the words that are there."""
    every = comparisons()
    found = {_path(name): _page(name, comparison) for name, comparison in every}
    found[DOCS / "results.md"] = _with_table(DOCS / "results.md", _overview(every))
    found[COLLECTIONS["pilots"]] = _with_table(COLLECTIONS["pilots"], _pilots())
    found[COLLECTIONS["earlier"]] = _with_table(COLLECTIONS["earlier"], _earlier())
    arena = RESULTS / "arena.md"
    found[arena] = arena_page.page(arena.read_text(encoding="utf-8"), arena_page.beds())
    return {path: rewritten(text) for path, text in found.items()}


def _path(name: str) -> Path:
    return RESULTS / f"{name}.md"


def _words(name: str) -> str:
    """What a comparison's page says by hand: all above the mark."""
    return _path(name).read_text(encoding="utf-8").partition(MARK.format(name=name))[0].strip()


def _page(name: str, comparison: Comparison) -> str:
    targets = targets_of(comparison)
    first = [] if targets is None else [targets]
    made = markdown(comparison, [], title=MARK.format(name=name), first=first)
    return f"{_words(name)}\n\n{made}\nHeld-out accuracy over generated tokens: [curves](curves.svg).\n"


def _with_table(path: Path, table: str) -> str:
    begin, end = TABLE
    before, rest = path.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def title_of(name: str) -> str:
    return _words(name).splitlines()[0].removeprefix("# ")


def _overview(every: Sequence[tuple[str, Comparison]]) -> str:
    """One row for each comparison of R³ with GRPO."""
    rows = []
    for name, c in every:
        if not {"grpo", "r3"} <= set(c.names):
            continue
        seeds = f"{len(c.seeds('r3'))}{', looked at' if c.exploratory else ''}"
        methods = ("grpo", "replay-only", "r3")
        finals = [percent(c.final(method, "pass@1")) if method in c.names else "–" for method in methods]
        tokens = ["–" if ratio is None else times(ratio) for ratio in (_ratio(c, other) for other in REFERENCES)]
        rows.append([f"[{title_of(name)}](results/{name}.md)", seeds, *finals, *tokens])
    header = ["comparison", "seeds", "final, grpo", "final, replay-only", "final, r3"]
    header += ["R³'s tokens to grpo's final", "R³'s tokens to that of dapo"]
    return markdown_table(Table("", header, rows, ""))


def _ratio(c: Comparison, other: str) -> Estimate | None:
    return c.token_ratio("r3", other).ratio if other in c.names and c.shared_seeds("r3", other) else None


def _pilots() -> str:
    rows = []
    for said, c in collection("pilots").values():
        start = 100 * c.start(c.names[0], "pass@1").value
        finals = ", ".join(f"{c.label(one)} {100 * c.final(one, 'pass@1').value:.1f}" for one in c.names)
        seeds = max(len(c.seeds(one)) for one in c.names)
        ratio = _ratio(c, "grpo") if "r3" in c.names else None
        told = "–" if ratio is None else times(ratio if seeds >= FEW else replace(ratio, low=math.nan, high=math.nan))
        rows.append([said["what"], str(seeds), f"{start:.1f}", finals, told, said["found"]])
    header = ["pilot", "seeds", "start", "final pass@1 (%)", "R³'s tokens to grpo's final", "what came of it"]
    return markdown_table(Table("", header, rows, ""))


def _earlier() -> str:
    rows = []
    for said, c in collection("earlier").values():
        finals = ", ".join(f"{c.label(name)} {percent(c.final(name, 'pass@1'))}" for name in c.names)
        ratio = _ratio(c, "grpo") if "r3" in c.names else None
        start = 100 * c.start(c.names[0], "pass@1").value
        told = "–" if ratio is None else times(ratio)
        rows.append([said["what"], str(len(c.seeds(c.names[0]))), f"{start:.1f}", finals, told, said["found"]])
    header = ["comparison", "seeds", "start", "final pass@1 (%)", "R³'s tokens to grpo's final", "what came of it"]
    return markdown_table(Table("", header, rows, ""))


def draw_curves(path: Path) -> None:
    """Held-out pass@1 over generated tokens, a panel for each comparison."""
    every = comparisons()
    with canvas("curves", (12.0, 3.0 * -(-len(every) // COLUMNS))) as figure:
        panels = figure.subplots(-(-len(every) // COLUMNS), COLUMNS, squeeze=False).flat
        for (name, c), axes in zip(every, panels, strict=False):
            draw_bands(axes, figures_of(c)[0])
            axes.set_title(fill(f"{title_of(name)}; {seed_list(c.plan['seeds'])}", 42), fontsize=8)
            axes.legend(frameon=False, fontsize=6)
        for axes in panels:  # what is left over
            axes.set_axis_off()
        figure.supxlabel("generated tokens (thousands)")
        figure.supylabel("held-out pass@1 (%)")
        figure.savefig(path, metadata={"Date": None})


def draw_overview(path: Path) -> None:
    """R³'s share of the other methods' tokens as bars of intervals, one row for each comparison."""
    every = [(name, c) for name, c in comparisons() if _ratio(c, "grpo") is not None]
    with canvas("overview", (9.0, 0.34 * len(every) + 1.2)) as figure:
        axes = figure.add_subplot()
        for colour, shift, other in (("#1f77b4", -0.13, "grpo"), ("#ff7f0e", 0.13, "dapo")):
            label = "GRPO's" if other == "grpo" else "DAPO's"
            axes.plot([], [], "o", color=colour, label=f"share of {label} tokens")
            for y, low, value, high, filled in _bars(every, other, shift):
                axes.plot([low, min(high, SHOWN)], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
                if value <= SHOWN:
                    axes.plot(value, y, "o", color=colour, markersize=5, markerfacecolor=colour if filled else "white")
                if high > SHOWN:
                    axes.plot(SHOWN, y, ">", color=colour, markersize=5, clip_on=False)
        if any(c.exploratory for _, c in every):
            axes.plot([], [], "o", color="grey", markerfacecolor="white", label="settings were chosen on these seeds")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(every)), [title_of(name) for name, _ in every])
        axes.set_ylim(len(every) - 0.5, -0.5)
        axes.set_xlim(0, SHOWN)
        axes.set_xlabel("R³'s tokens to the other's final pass@1, as a share of its own (arrow: beyond)")
        axes.grid(axis="x", alpha=0.3)
        figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=3)
        figure.savefig(path, metadata={"Date": None})


def _bars(
    every: Sequence[tuple[str, Comparison]], other: str, shift: float
) -> Iterator[tuple[float, float, float, float, bool]]:
    """Height, low end, value and high end of each interval, and whether it is of fresh seeds."""
    for place, (_, c) in enumerate(every):
        ratio = _ratio(c, other)
        if ratio is not None and not math.isnan(ratio.low):
            yield place + shift, min(ratio.low, SHOWN), ratio.value, ratio.high, not c.exploratory


def add(out: Path, name: str) -> None:
    """Condense a comparison, with the commit that its commands belong to."""
    plan, records = read_records(out)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    path = RESULTS / "raw" / f"{name}.json"
    condense({**plan, "commit": commit.stdout.strip()}, records, path)
    if not _path(name).exists():
        _path(name).write_text(f"# {name}\n\n{MARK.format(name=name)}\n", encoding="utf-8")
    print(f"{path}: {len(records)} cells; now say what it was for in {_path(name)}, above the mark, and make results")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="condense the --out of an r3 compare")
    adding.add_argument("out", type=Path, metavar="OUT")
    adding.add_argument("name", metavar="NAME")
    chosen: Any = parser.parse_args(arguments)
    if chosen.command == "add":
        add(chosen.out, chosen.name)
        return
    draw_overview(RESULTS / "token-ratios.svg")
    draw_curves(RESULTS / "curves.svg")
    if arena := arena_page.beds():
        arena_page.draw(RESULTS / arena_page.FIGURE, arena)
    made = pages()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(made)} pages under {DOCS}")


if __name__ == "__main__":
    main()
