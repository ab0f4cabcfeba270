"""The report as one self-contained HTML file, in light and dark, for desktop and phone."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from r3.compare.tables import Table

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
