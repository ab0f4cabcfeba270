"""Write docs/results.md, its figures and docs/pilots.md from the raw files in docs/results/: no table is typed by hand.

    python docs/make_results.py          (make results)

Each folder of docs/results/ is the --out of an `r3 compare`, cut down to raw/, with an about.md of words: what was
asked and what to make of it (a test looks up the intervals that the words name). introduction.md and pilots.md there
open the two pages; an overview follows.
"""

from __future__ import annotations

import re
from pathlib import Path

from r3.compare.analysis import Comparison
from r3.compare.figures import figures_of, write_figures
from r3.compare.report import markdown, markdown_table
from r3.compare.tables import Table, percent, times

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ORDER = ("embedded", "tiny", "smollm2", "beyond", "pilot")
"""What a folder's name begins with: the main comparisons first, what only led to them last."""
SHOWN = ("grpo", "dapo", "r3", "replay-only")
HEAD = "<!-- Made by docs/make_results.py from docs/results/: do not edit, run `make results`. -->"


def page(results: Path = RESULTS, *, pilots: bool = False) -> str:
    """The whole page: of the comparisons, or of the pilots that led to them, which have no figures."""
    words = (results / ("pilots.md" if pilots else "introduction.md")).read_text(encoding="utf-8").strip()
    parts = [HEAD, words, overview(results, pilots=pilots)]
    for folder in folders(results, pilots=pilots):
        comparison = Comparison.read(folder)
        about = (folder / "about.md").read_text(encoding="utf-8").strip()
        drawn = [] if pilots else figures_of(comparison)
        figures = f"results/{folder.name}/figures"
        parts.append(markdown(comparison, drawn, folder=figures, level=2, title=about).strip())
    return "\n\n".join(parts) + "\n"


def overview(results: Path, *, pilots: bool) -> str:
    """One row a comparison of R³ with GRPO."""
    rows = []
    for folder in folders(results, pilots=pilots):
        comparison = Comparison.read(folder)
        if rank(folder) != ORDER.index("beyond") and {"grpo", "r3"} <= set(comparison.names):
            rows.append(_row(_title(folder), comparison))
    table = Table(
        "Overview",
        [
            *("comparison", "seeds", "at the start", *(f"final, {name}" for name in SHOWN)),
            *("R³'s tokens to grpo's final", "to dapo's final"),
        ],
        rows,
        "Held-out pass@1 in per cent, at the same number of generated tokens; tokens as a share of the other's own. "
        "What the intervals mean stands under each comparison.",
    )
    return f"## Overview\n\n{markdown_table(table)}\n\n{table.note}"


def _row(title: str, c: Comparison) -> list[str]:
    finals = [percent(c.final(name, "pass@1")) if name in c.names and c.seeds(name) else "–" for name in SHOWN]
    others = [name if name in c.names and c.shared_seeds("r3", name) else None for name in SHOWN[:2]]
    tokens = ["–" if name is None else times(c.token_ratio("r3", name).ratio) for name in others]
    link = f"[{title}](#{_anchor(title)})"
    return [link, str(len(c.seeds("r3"))), percent(c.start("r3", "pass@1")), *finals, *tokens]


def _title(folder: Path) -> str:
    return (folder / "about.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("## ")


def _anchor(title: str) -> str:
    """What GitHub makes of a heading.

    >>> _anchor("SmolLM2-135M: A::B programs (one H200)")
    'smollm2-135m-ab-programs-one-h200'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def rank(folder: Path) -> int:
    return next(i for i, name in enumerate(ORDER) if folder.name.startswith(name))


def folders(results: Path = RESULTS, *, pilots: bool = False) -> list[Path]:
    """Of the comparisons, or of the pilots, in the order of the page."""
    found = sorted((path.parent.parent for path in results.glob("*/raw/plan.json")), key=lambda f: (rank(f), f.name))
    return [folder for folder in found if (rank(folder) == ORDER.index("pilot")) == pilots]


def main() -> None:
    for folder in folders():
        write_figures(figures_of(Comparison.read(folder)), folder / "figures", ["svg"])
    for name, pilots in (("results.md", False), ("pilots.md", True)):
        (HERE / name).write_text(page(pilots=pilots), encoding="utf-8")
        print(f"{HERE / name}: {len(folders(pilots=pilots))} comparisons")


if __name__ == "__main__":
    main()
