"""The report of a comparison, made from its raw files alone: report.md, report.html, figures and a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from r3.compare.analysis import Comparison
from r3.compare.figures import FORMATS, Figure, figures_of, write_figures
from r3.compare.page import html_page
from r3.compare.plan import RATE, seed_list
from r3.compare.tables import Table, tables_of
from r3.compare.verdicts import claims_table, judged_claims
from r3.run.disk import write_atomically


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
