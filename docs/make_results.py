"""Write docs/results.md, and the figures it shows, from the raw files in docs/results/: no number is typed by hand.

    python docs/make_results.py          (make results)

Each folder of docs/results/ is the --out of an `r3 compare`, cut down to raw/, with an about.md of words: what was
asked and what to make of it. introduction.md opens the page.
"""

from __future__ import annotations

from pathlib import Path

from r3.compare.analysis import Comparison
from r3.compare.figures import figures_of, write_figures
from r3.compare.report import markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HEAD = "<!-- Made by docs/make_results.py from docs/results/: do not edit, run `make results`. -->"


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    parts = [HEAD, (results / "introduction.md").read_text(encoding="utf-8").strip()]
    for folder in folders(results):
        comparison = Comparison.read(folder)
        about = (folder / "about.md").read_text(encoding="utf-8").strip()
        figures = f"results/{folder.name}/figures"
        parts.append(markdown(comparison, figures_of(comparison), folder=figures, level=2, title=about).strip())
    return "\n\n".join(parts) + "\n"


def folders(results: Path = RESULTS) -> list[Path]:
    """Of the comparisons, in the order of their names."""
    return sorted(path.parent.parent for path in results.glob("*/raw/plan.json"))


def main() -> None:
    for folder in folders():
        write_figures(figures_of(Comparison.read(folder)), folder / "figures", ["svg"])
    (HERE / "results.md").write_text(page(), encoding="utf-8")
    print(f"{HERE / 'results.md'}: {len(folders())} comparisons")


if __name__ == "__main__":
    main()
