"""The page of the arena, docs/results/arena.md, and its figure, from the raw files of its beds.

What was asked, what was expected and what to make of it is written by hand above the mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from r3.compare.analysis import Comparison
from r3.compare.plan import RATE, seed_list
from r3.compare.report import markdown_table
from r3.compare.statistics import PairedTest, holm
from r3.compare.tables import Table, percent, times
from r3.evaluate.passk import Estimate
from tools.sentences import rewritten

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PREFIX = "arena-"
"""Begins the names of the raw files, one per table: condensed comparisons, with what the tuning found in the plan."""
MARK = "<!-- What follows is made by tools/arena_page.py from raw/arena-*.json: edit above, then `make results`. -->"
FIGURE = "arena.svg"
TITLES = {
    "sums": "Sums of 9 and 10 terms, bundled model",
    "sums-with-help": "The same sums, with demonstrations, hints and right answers shown",
    "spelling": "Spelling words of ten letters backward, tiny model",
}
NOTES = {
    "sums-with-help": "LUFFY trains on a right working of every sum, SAGE shows the first steps of one where a group "
    "solved none, Critique-GRPO the right result behind a wrong answer. GRPO and R³ see none of it, nor do the other "
    "methods of this page: the rows say what such help is worth here, not which method makes more of the same data. "
    "The rows of GRPO and R³ are those of the table above; Holm's correction is over this table's comparisons alone."
}
"""What to know before a table is read."""
SIGNIFICANT = 0.05


def beds(results: Path = RESULTS) -> dict[str, Comparison]:
    """The finished beds by name, the sums first."""
    paths = {path.stem.removeprefix(PREFIX): path for path in (results / "raw").glob(f"{PREFIX}*.json")}
    order = [*(name for name in TITLES if name in paths), *sorted(paths.keys() - TITLES.keys())]
    return {name: Comparison.read(paths[name]) for name in order}


def title_of(name: str) -> str:
    return TITLES.get(name, name)


def write(results: Path = RESULTS) -> str:
    """The page and its figure; says where they are."""
    found = beds(results)
    path = results / "arena.md"
    words = path.read_text(encoding="utf-8") if path.exists() else f"# The arena\n\n{MARK}\n"
    path.write_text(page(words, found), encoding="utf-8")
    if found:
        draw(results / FIGURE, found)
    return f"{path}: {len(found)} beds"


def page(old: str, found: dict[str, Comparison]) -> str:
    """The page, with the words that are there above the mark."""
    parts = [old.partition(MARK)[0].strip(), MARK]
    parts += [f"![Final pass@1 of every method, with 95 % intervals]({FIGURE})"] if found else ["Not run yet."]
    for name, comparison in found.items():
        parts += _bed(title_of(name), comparison, NOTES.get(name))
    return rewritten("\n\n".join(parts) + "\n")


def _bed(title: str, c: Comparison, note: str | None) -> list[str]:
    table, rates = outcome_table(c), rates_table(c)
    return [
        f"## {title}",
        _setting(c),
        *([] if note is None else [note]),
        markdown_table(table),
        table.note,
        f"### {rates.title}",
        markdown_table(rates),
        rates.note,
        f"```\n{c.records[c.baseline][0].command}\n```",
    ]


def _setting(c: Comparison) -> str:
    train, rollout = c.plan["common"]["train"], c.plan["common"]["rollout"]
    versions = c.records[c.baseline][0].versions
    missing = f" **Not finished:** {', '.join(f'{name} seed {seed}' for name, seed in c.missing)}." if c.missing else ""
    return (
        f"{c.plan['recipe']}, {c.plan['tokens']:,} generated tokens per cell, {seed_list(c.plan['seeds'])}; "
        f"{train['queries_per_step']} queries × {rollout['group_size']} answers per step, "
        f"{train['updates_per_batch']} updates per batch, at most {rollout['max_tokens']} tokens each; "
        f"{c.problems} held-out problems, {c.k} answers each. Commit {c.plan['commit']}, "
        f"torch {versions.get('torch')}.{missing}"
    )


def tests_of(c: Comparison) -> dict[str, tuple[PairedTest, float]]:
    """Each method's difference to the baseline in final pass@1, with the p of its t test after Holm's correction."""
    tests = {
        name: c.test(name, c.baseline, "pass@1")
        for name in c.names
        if name != c.baseline and len(c.shared_seeds(name, c.baseline)) > 1
    }
    corrected = holm([test.p_t for test in tests.values()])
    return dict(zip(tests, zip(tests.values(), corrected, strict=True), strict=True))


def outcome_table(c: Comparison) -> Table:
    """All that the final cells say, one row for each method."""
    tests = tests_of(c)
    rows = []
    for name in c.names:
        row = [name, f"{c.plan['variants'][name].get(RATE, c.plan['common']['train']['learning_rate']):g}"]
        row += [percent(c.final(name, "pass@1"))]
        if name in tests:
            test, corrected = tests[name]
            shown = f"**{_p(corrected)}**" if corrected <= SIGNIFICANT else _p(corrected)
            row += [percent(test.difference), f"{_p(test.p_t)} ({_p(test.p_sign_flip)})", shown]
            ratio = c.token_ratio(name, c.baseline)
            tokens = times(ratio.ratio)
        else:
            row, tokens = [*row, "–", "–", "–"], "–"
        row += [percent(c.final(name, c.metrics[-1])), tokens]
        row += [f"{100 * c.edge(name, 'solve_none', last=True).value:.1f}"]
        row += [f"{c.total(name, 'seconds/step'):.0f}", f"{c.total(name, 'forwards/extra'):,.0f}"]
        rows.append(row)
    least = next(iter(tests.values()))[0].p_least if tests else math.nan
    header = ["method", "rate", "final pass@1", f"− {c.baseline}", "p, t (sign-flip)", "p after Holm"]
    header += [f"final {c.metrics[-1]}", f"tokens to {c.baseline}'s final pass@1", "solve-none at the end"]
    return Table(
        "",
        [*header, "seconds in steps", "extra forwards"],
        rows,
        "In per cent, with 95 % intervals over seeds and held-out problems. "
        f"Differences are paired by seed; Holm's correction is over the {len(tests)} comparisons with {c.baseline} of "
        f"this table, on the p of the t test; bold: at most {SIGNIFICANT:g}. The exact sign-flip test over seeds "
        f"stands beside it uncorrected; with so many seeds it cannot be below {least:.2g}, so after the correction it "
        "could reject little or nothing. Solve-none: groups without a right answer over the last tenth of the budget. "
        "Seconds are those of the training steps, beside whatever else the machine did. Extra forwards: answers that "
        "went through the model once more without a gradient, over the whole cell. Means over seeds.",
    )


def _p(value: float) -> str:
    """A p-value.

    >>> _p(0.00004), _p(0.0312), _p(1.0)
    ('<0.001', '0.031', '1')
    """
    return "<0.001" if value < 0.001 else f"{value:.2g}"


def rates_table(c: Comparison) -> Table:
    """What the tuning found."""
    tuning: dict[str, Any] = c.plan["tuning"]
    rates = list(next(iter(tuning["finals"].values())))
    rows = []
    for name in c.names:
        row = [name]
        for rate in rates:
            values = tuning["finals"][name][rate]
            mean = f"{100 * sum(values) / len(values):.1f}" if values else "failed"
            row.append(f"**{mean}**" if rate == tuning["chosen"][name] else mean)
        rows.append(row)
    return Table(
        "How the learning rates were chosen",
        ["method", *rates],
        rows,
        f"Mean final pass@1 in per cent after {tuning['tokens']:,} generated tokens over {seed_list(tuning['seeds'])}, "
        "which the table above does not have; the best mean was taken (bold), the lower rate where two were equal. "
        "The same held-out problems as above. All other settings are the recipe's and the preset's, for all methods "
        "alike.",
    )


def draw(path: Path, found: dict[str, Comparison]) -> None:
    """Final pass@1 of every method, a panel for each bed, the baseline's interval shaded."""
    rows = max(len(c.names) for c in found.values())
    with canvas("arena", (4.6 * len(found) + 0.8, 0.26 * rows + 1.0)) as figure:
        panels = figure.subplots(1, len(found), squeeze=False)[0]
        for (name, c), axes in zip(found.items(), panels, strict=True):
            _panel(axes, title_of(name), c)
        figure.supxlabel("final held-out pass@1 (%), 95 % intervals over seeds and problems", fontsize=9)
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Any, title: str, c: Comparison) -> None:
    finals = {name: c.final(name, "pass@1") for name in c.names}
    tests = tests_of(c)
    base = finals[c.baseline]
    axes.axvline(100 * base.value, color="black", linewidth=0.8)
    if not math.isnan(base.low):
        axes.axvspan(100 * base.low, 100 * base.high, color="black", alpha=0.06, linewidth=0)
    for place, (name, found) in enumerate(finals.items()):
        shown = name in tests and tests[name][1] <= SIGNIFICANT
        _bar(axes, place, found, "#D55E00" if shown else "#0072B2")
    axes.set_yticks(range(len(finals)), list(finals))
    axes.set_ylim(len(finals) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_title(fill(f"{title}; {seed_list(c.plan['seeds'])}", 48), fontsize=9)
    axes.grid(axis="x", alpha=0.3)


def _bar(axes: Any, y: int, found: Estimate, colour: str) -> None:
    if not math.isnan(found.low):
        axes.plot([100 * found.low, 100 * found.high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot(100 * found.value, y, "o", color=colour, markersize=5)


@contextmanager
def canvas(name: str, size: Sequence[float]) -> Iterator[Any]:
    """A figure that is the same bytes for the same numbers."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": f"r3-{name}", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=tuple(size), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
