"""Write docs/results.md, docs/results/*.md, docs/pilots.md and their figures from raw files: no table is typed by hand.

    python tools/make_results.py                    (make results)
    python tools/make_results.py add OUT NAME       condense the --out of an r3 compare into docs/results/raw/NAME.json

docs/results/raw/ has one file of raw numbers for each comparison, and one for all pilots; docs/results/words/ has what
was asked and what to make of it (a test looks up the intervals that the words name).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3.compare.analysis import Comparison
from r3.compare.figures import Figure, figures_of, write_figures
from r3.compare.plan import seed_list
from r3.compare.records import Record, condense, read_records
from r3.compare.report import markdown, markdown_table
from r3.compare.tables import Table, percent, times
from r3.evaluate.passk import Estimate

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
HEAD = "<!-- Made by tools/make_results.py from docs/results/: do not edit, run `make results`. -->"
ORDER = (
    *("embedded", "embedded-groups-of-four", "embedded-harder", "embedded-harder-groups-of-four"),
    *("embedded-now-and-then", "tiny-spelling", "smollm2-longer-lists", "smollm2-lists", "smollm2-sums"),
    *("smollm2-sums-seldom", "smollm2-sums-earlier", "smollm2-spelling", "smollm2-reversal", "smollm2-filtering"),
    *("smollm2-rewriting", "smollm2-rewriting-earlier", "smollm2-gsm8k"),
    *("embedded-earlier", "embedded-harder-earlier", "beyond"),
)
"""The comparisons, the main ones first."""
REFERENCES = ("grpo", "dapo")
OVERVIEW = "token-ratios"
SHOWN = 2.0
"""Where the axis of the overview ends: what lies beyond has an arrow."""


def comparisons() -> list[tuple[str, Comparison]]:
    """By name, in the order of the page; one that the order does not name comes last."""
    names = [path.stem for path in (RESULTS / "raw").glob("*.json") if path.stem != "pilots"]
    names.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return [(name, Comparison.read(RESULTS / "raw" / f"{name}.json")) for name in names]


def pilots() -> dict[str, Comparison]:
    raw = json.loads((RESULTS / "raw" / "pilots.json").read_bytes())
    return {name: Comparison(one["plan"], [Record(**cell) for cell in one["cells"]]) for name, one in raw.items()}


def pages() -> dict[Path, str]:
    """Every page that is made, as text."""
    every = comparisons()
    found = {RESULTS / f"{name}.md": _page(name, comparison) for name, comparison in every}
    figure = f"![Tokens to the final accuracy of the other method](results/figures/{OVERVIEW}.svg)"
    found[DOCS / "results.md"] = _filled("results", figure=figure, table=_overview(every))
    found[DOCS / "pilots.md"] = _filled("pilots", table=_pilots())
    return found


def figures() -> list[Figure]:
    return [_figure(name, comparison) for name, comparison in comparisons()]


def _words(name: str) -> str:
    return (RESULTS / "words" / f"{name}.md").read_text(encoding="utf-8").strip()


def _filled(name: str, **parts: str) -> str:
    """A page of words with what is generated where the words leave room for it."""
    text = _words(name)
    for key, part in parts.items():
        text = text.replace(f"<!-- {key} -->", part)
    return f"{HEAD}\n\n{text}\n"


def _page(name: str, comparison: Comparison) -> str:
    words = _words(name)
    return f"{HEAD}\n\n{markdown(comparison, [_figure(name, comparison)], title=words)}"


def _figure(name: str, comparison: Comparison) -> Figure:
    """Held-out accuracy, of the seeds that its page is about."""
    figure = figures_of(comparison)[0]
    return replace(figure, name=name, title=f"{figure.title}, {seed_list(comparison.plan['seeds'])}")


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
    header += ["R³'s tokens to grpo's final", "R³'s tokens to that of dapo (truncated masked)"]
    return markdown_table(Table("", header, rows, ""))


def _ratio(c: Comparison, other: str) -> Estimate | None:
    return c.token_ratio("r3", other).ratio if other in c.names and c.shared_seeds("r3", other) else None


def _pilots() -> str:
    words = tomllib.loads((RESULTS / "words" / "pilots.toml").read_text(encoding="utf-8"))
    every = pilots()
    rows = []
    for name, said in words.items():
        c = every[name]
        start = 100 * c.start(c.names[0], "pass@1").value
        finals = ", ".join(f"{c.label(one)} {100 * c.final(one, 'pass@1').value:.1f}" for one in c.names)
        seeds = max(len(c.seeds(one)) for one in c.names)
        rows.append([said["what"], f"{c.plan['tokens'] // 1000:,}k", str(seeds), f"{start:.1f}", finals, said["found"]])
    header = ["pilot", "tokens per cell", "seeds", "pass@1 at the start", "final pass@1 (%)", "what came of it"]
    return markdown_table(Table("", header, rows, ""))


def draw_overview(folder: Path) -> None:
    """R³'s share of the other methods' tokens as bars of intervals, one row for each comparison."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    every = [(name, c) for name, c in comparisons() if _ratio(c, "grpo") is not None]
    with rc_context({"svg.hashsalt": "r3-overview", "svg.fonttype": "none", "font.size": 9}):
        canvas = Canvas(figsize=(9.0, 0.34 * len(every) + 1.2), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        for colour, shift, other in (("#1f77b4", -0.13, "grpo"), ("#ff7f0e", 0.13, "dapo")):
            label = "GRPO's tokens" if other == "grpo" else "DAPO's, truncated answers masked (not as published)"
            axes.plot([], [], "o", color=colour, label=f"share of {label}")
            for y, low, value, high, filled in _bars(every, other, shift):
                axes.plot([low, min(high, SHOWN)], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
                if value <= SHOWN:
                    axes.plot(value, y, "o", color=colour, markersize=5, markerfacecolor=colour if filled else "white")
                if high > SHOWN:
                    axes.plot(SHOWN, y, ">", color=colour, markersize=5, clip_on=False)
        axes.plot([], [], "o", color="grey", markerfacecolor="white", label="settings were chosen on these seeds")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(every)), [title_of(name) for name, _ in every])
        axes.set_ylim(len(every) - 0.5, -0.5)
        axes.set_xlim(0, SHOWN)
        axes.set_xlabel("R³'s tokens to the other's final pass@1, as a share of its own (arrow: beyond)")
        axes.grid(axis="x", alpha=0.3)
        canvas.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=3)
        folder.mkdir(parents=True, exist_ok=True)
        canvas.savefig(folder / f"{OVERVIEW}.svg", metadata={"Date": None})


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
    print(f"{path}: {len(records)} cells; now say what it was for in {RESULTS / 'words' / f'{name}.md'}")


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
    write_figures(figures(), RESULTS / "figures", ["svg"])
    draw_overview(RESULTS / "figures")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages under {DOCS}")


if __name__ == "__main__":
    main()
