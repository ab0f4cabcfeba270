"""The report of a comparison, made from its raw files alone: report.md, report.html, figures and a summary.

A figure has a line for each variant over generated tokens, with its 95 % interval shaded. The HTML is one file with
all it needs, in light and dark, for desktop and phone.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.compare.analysis import Band, Comparison
from r3.compare.plan import RATE, seed_list
from r3.compare.tables import Table, claims_table, judged_claims, tables_of
from r3.evaluate.curves import line_style, require_matplotlib
from r3.run.disk import write_atomically

FORMATS = ("svg", "png")


def write_report(out: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write all files of the report. Returns them, the most readable first."""
    comparison = Comparison.read(out)
    figures = figures_of(comparison)
    drawn = write_figures(figures, out / "figures", formats)
    page, text, summary = out / "report.html", out / "report.md", out / "summary.json"
    write_atomically(text, markdown(comparison, figures).encode())
    written = html_page(
        f"Comparison: {', '.join(comparison.names)}",
        [text.replace("**", "") for text in _setting(comparison)],
        [out / "figures" / f"{figure.name}.svg" for figure in figures],
        every_table(comparison),
        commands(comparison),
    )
    write_atomically(page, written.encode())
    numbers = {**comparison.as_dict(), "claims": judged_claims(comparison)}
    write_atomically(summary, (json.dumps(numbers, indent=1) + "\n").encode())
    return [page, text, summary, *drawn]


def every_table(comparison: Comparison) -> list[Table]:
    """All tables: the verdicts on claims first, if there are any, then the numbers."""
    claims = claims_table(comparison)
    return [*([] if claims is None else [claims]), *tables_of(comparison)]


def markdown(
    comparison: Comparison,
    figures: Sequence[Figure],
    *,
    folder: str = "figures",
    level: int = 1,
    title: str = "",
    first: Sequence[Table] = (),
) -> str:
    """The report as Markdown, with headings from `level` down; `folder` has its figures.

    `first` are tables that come before all others.
    """
    mark = "#" * level
    parts = [title or f"{mark} Comparison: {', '.join(comparison.names)}", *_setting(comparison)]
    for table in [*first, *every_table(comparison)]:
        parts += [f"{mark}# {table.title}", markdown_table(table), table.note]
    parts += [f"{mark}# Curves"] if figures else []
    parts += [f"![{figure.title}]({folder}/{figure.name}.svg)" for figure in figures]
    where = f", at commit {comparison.plan['commit']}" if "commit" in comparison.plan else ""
    parts += [f"{mark}# Commands", f"Each cell is a run of its own{where}:", f"```\n{commands(comparison)}\n```"]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table in Markdown."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def commands(comparison: Comparison) -> str:
    """One command for each variant, with its first seed; the others differ in run.seed and run.dir."""
    return "\n".join(comparison.records[name][0].command for name in comparison.names)


def _setting(c: Comparison) -> list[str]:
    """Sentences on what all cells share, and on what is missing."""
    common = c.plan["common"]
    model, task, train, rollout = (common[name] for name in ("model", "task", "train", "rollout"))
    record = c.records[c.names[0]][0]
    looked_at = c.looked_at.plan["seeds"] if c.looked_at is not None else []
    said = [
        f"Recipe {c.plan['recipe'] or 'embedded default'}, model {model['path']}, task {_task_name(task)}; "
        f"{c.plan['tokens']:,} generated tokens per cell, {seed_list(c.plan['seeds'])}; "
        f"{train['queries_per_step']} queries × {rollout['group_size']} answers per step, "
        f"at most {rollout['max_tokens']} tokens each{_held_out_limit(common)}, learning rate "
        f"{train['learning_rate']:g}{_own_rates(c)}. Equal for all methods; the tokens of reflection groups and of "
        f"resampled groups count. torch {record.versions.get('torch')}, "
        f"transformers {record.versions.get('transformers')}.",
    ]
    if c.exploratory:
        said.append(
            "**No fresh seeds:** settings were chosen on all of these, so nothing here is evidence for a claim."
        )
    if looked_at:
        said.append(
            f"Settings were chosen on {seed_list(looked_at)}: only the last table is of these, all else of the others."
        )
    if c.missing:
        cells = ", ".join(f"{name} seed {seed}" for name, seed in c.missing)
        said.append(f"**Not finished:** {cells}. What follows is of the other cells.")
    return said


def _own_rates(c: Comparison) -> str:
    """The methods with their own learning rate."""
    rates = {name: c.plan["variants"][name].get(RATE) for name in c.names}
    tuned = ", ".join(f"{c.label(name)} {rate:g}" for name, rate in rates.items() if rate is not None)
    return f" (tuned for each: {tuned})" if tuned else ""


def _held_out_limit(common: dict[str, dict[str, object]]) -> str:
    """The length limit of held-out answers, where it differs."""
    limit = common.get("evaluate", {}).get("max_tokens")
    return "" if limit is None else f" ({limit} of held-out ones)"


def _task_name(task: dict[str, object]) -> str:
    """The task with the settings that make it easy or hard.

    >>> _task_name({"name": "reasoning-gym", "family": "ab", "options": {"length": 9}, "size": 64, "rows": None})
    "reasoning-gym (family ab, options {'length': 9}, size 64)"
    """
    known = {"file": "path rows", "reasoning-gym": "family options size"}.get(str(task["name"]), "difficulty size")
    said = ", ".join(f"{key} {task[key]}" for key in known.split() if task.get(key))
    return f"{task['name']} ({said})"


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, ready to be drawn."""

    name: str
    title: str
    up: str
    bands: Mapping[str, Band]
    percent: bool = True


def figures_of(comparison: Comparison) -> list[Figure]:
    """Accuracy on held-out problems, and what the paper shows over training: solve-none, solve-all, entropy."""
    names = comparison.names
    figures = [
        Figure(
            metric.replace("@", "_at_"),
            f"Held-out {metric}",
            f"{metric} (%)",
            {comparison.label(name): comparison.band(name, metric) for name in names},
        )
        for metric in comparison.metrics
    ]
    for series, title, percent in (
        ("solve_none", "Groups without a right answer", True),
        ("solve_all", "Groups without a wrong answer", True),
        ("truncated", "Truncated answers", True),
        ("entropy", "Policy entropy", False),
    ):
        bands = {comparison.label(name): comparison.training_band(name, series) for name in names}
        figures.append(Figure(series, title, "share (%)" if percent else "nats per token", bands, percent))
    return figures


def write_figures(figures: Sequence[Figure], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw every figure in every format; the same numbers are the same bytes."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    return [path for figure in figures for path in _draw(figure, folder, formats)]


def _draw(figure: Figure, folder: Path, formats: Sequence[str]) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with rc_context({"svg.hashsalt": f"r3-{figure.name}", "svg.fonttype": "none", "font.size": 10}):
        canvas = Canvas(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        draw_bands(axes, figure)
        axes.set_title(figure.title)
        axes.set_xlabel("generated tokens (thousands)")
        axes.set_ylabel(figure.up)
        paths = [folder / f"{figure.name}.{kind}" for kind in formats]
        for path, kind in zip(paths, formats, strict=True):
            canvas.savefig(path, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return paths


def draw_bands(axes: Any, figure: Figure) -> None:
    """The lines with their bands and a legend."""
    for place, (label, band) in enumerate(figure.bands.items()):
        _line(axes, label, band, place, 100 if figure.percent else 1)
    axes.set_ylim(0, _top(figure))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def _top(figure: Figure) -> float | None:
    """Axis limits with room for the lines and most of their bands; with few seeds some bands would fill any axis."""
    highest = max((point.value for band in figure.bands.values() for point in band.points), default=0.0)
    if highest <= 0:
        return None
    return min(100.0, 160 * highest) if figure.percent else 1.6 * highest


def _line(axes: Any, label: str, band: Band, place: int, scale: float) -> None:
    xs = [tokens / 1000 for tokens in band.tokens]
    style = line_style(place)
    axes.plot(xs, [scale * p.value for p in band.points], markersize=3, label=label, **style)
    if not any(math.isnan(p.low) for p in band.points):  # one seed has no interval
        lows, highs = ([scale * getattr(p, end) for p in band.points] for end in ("low", "high"))
        axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.12, linewidth=0)


# ------------------------------------------------------------------------- HTML


# Colours of the lines (r3.evaluate.curves.COLOURS) and of what matplotlib draws around them: on light, on dark.
PAINTS = {
    "#ffffff": ("paper", "#ffffff", "#1b1f26"),
    "#000000": ("ink", "#1d2430", "#e4e8ee"),
    "#b0b0b0": ("grid", "#b0b0b0", "#7b8594"),
    "#0072b2": ("blue", "#0072b2", "#4aa8e0"),
    "#d55e00": ("vermillion", "#d55e00", "#ee8440"),
    "#009e73": ("green", "#009e73", "#2fbf95"),
    "#cc79a7": ("purple", "#cc79a7", "#d990b8"),
    "#e69f00": ("orange", "#e69f00", "#efb338"),
    "#56b4e9": ("sky", "#56b4e9", "#8fd0f5"),
}
STYLE = (
    ":root { color-scheme: light dark; "
    + "; ".join(f"--{name}: light-dark({light}, {dark})" for name, light, dark in PAINTS.values())
    + """;
  --page: light-dark(#f7f8fa, #14171c); --quiet: light-dark(#566070, #a3adbb); --line: light-dark(#d9dde3, #343b46);
  --head: light-dark(#f1f3f6, #232830) }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--page) }
h1, p { overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin: 1.75rem 0 .5rem }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--paper) }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-top: 1px solid var(--line); padding: .35rem .6rem; text-align: left; white-space: nowrap }
th { background: var(--head); border-top: 0 }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper) } th:first-child {
  background: var(--head) }
td.words { white-space: normal; min-width: 14rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem }
figure { margin: 0; padding: .5rem; min-width: 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--paper) }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--ink) }
p.note { color: var(--quiet); font-size: 13px; max-width: 60rem; margin: .5rem 0 }
pre { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; overflow-x: auto }
@media (max-width: 720px) { body { margin: 1rem auto; padding: 0 .75rem } td:first-child, th:first-child {
  max-width: 9rem; white-space: normal } }
"""
)
WORDS = 40
"""A cell with at least this many characters is text that may wrap, not a number."""


def html_page(
    title: str, setting: Sequence[str], figures: Sequence[Path], tables: Sequence[Table], commands: str
) -> str:
    """The whole report, with its figures (SVG files) inline."""
    drawn = "\n".join(f"<figure>{_inline(path)}</figure>" for path in figures)
    shown = "\n".join(_html_table(table) for table in tables)
    said = "\n".join(f"<p>{html.escape(text)}</p>" for text in setting)
    title = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{said}\n<h2>Curves</h2>\n"
        f'<div class="figures">\n{drawn}\n</div>\n{shown}\n'
        f"<h2>Commands</h2>\n<pre>{html.escape(commands)}</pre>\n</body></html>\n"
    )


def _inline(path: Path) -> str:
    """An SVG file without its XML head, with its colours replaced by the page's."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", _paint, text[text.index("<svg") :])


def _paint(match: re.Match[str]) -> str:
    paint = PAINTS.get(match[0])
    return match[0] if paint is None else f"var(--{paint[0]})"


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.header)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    return (
        f'<h2>{html.escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
        f'<tbody>\n{body}\n</tbody></table></div>\n<p class="note">{html.escape(table.note)}</p>'
    )


def _cell(text: str) -> str:
    words = ' class="words"' if len(text) > WORDS else ""
    return f"<td{words}>{html.escape(text)}</td>"
