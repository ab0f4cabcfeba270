"""Draw the figure of the README from a run's metrics: `python docs/figures/make.py runs/r3-arithmetic-0`.

Held-out accuracy would need an evaluation at every step, so the curve is the accuracy on the training questions, as
sampled; the two points with intervals are the held-out accuracy before and after.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 380, 220, 46, 34
INK, GRID = "#57606a", "#d0d7de"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#b8bec6"  # told apart by colour-blind readers too


def main() -> None:
    """Write demo.svg beside this script."""
    lines = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    panels = [accuracy_panel(lines, steps), group_panel(steps)]
    body = "".join(f'<g transform="translate({i * (WIDTH + 80)},0)">{panel}</g>' for i, panel in enumerate(panels))
    width, height = 2 * WIDTH + 80 + LEFT + 20, HEIGHT + TOP + 44
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )
    (Path(__file__).parent / "demo.svg").write_text(svg)


def accuracy_panel(lines: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """Training accuracy as a smoothed line, held-out accuracy as points with their intervals."""
    last = steps[-1]["step"]
    smooth = [mean([s["accuracy"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    line = " ".join(f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, smooth, strict=True))
    marks = ""
    for held in (h for h in lines if "heldout/accuracy" in h):
        at = x(held["step"], last)
        marks += (
            f'<line x1="{at}" x2="{at}" y1="{y(held["heldout/low"])}" y2="{y(held["heldout/high"])}" '
            f'stroke="{ORANGE}" stroke-width="2"/>'
            f'<circle cx="{at}" cy="{y(held["heldout/accuracy"])}" r="4" fill="{ORANGE}"/>'
        )
    key = legend([(BLUE, "training questions, as sampled"), (ORANGE, "held-out problems, 95 % interval")])
    return (
        frame("Accuracy", last)
        + f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
        + marks
        + key
    )


def group_panel(steps: Sequence[dict[str, Any]]) -> str:
    """Shares of solve-none, mixed and solve-all groups, stacked."""
    last = steps[-1]["step"]
    none = [mean([s["solve_none"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    rest = [1 - mean([s["solve_all"] for s in steps[max(0, i - 4) : i + 1]]) for i in range(len(steps))]
    areas = ""
    for low, high, colour in (([0.0] * len(none), none, ORANGE), (none, rest, GREY), (rest, [1.0] * len(rest), BLUE)):
        there = [f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, high, strict=True)]
        back = [f"{x(s['step'], last):.1f},{y(v):.1f}" for s, v in zip(steps, low, strict=True)]
        areas += f'<polygon points="{" ".join(there + back[::-1])}" fill="{colour}" fill-opacity="0.85"/>'
    key = legend([(ORANGE, "all wrong (solve-none)"), (GREY, "mixed"), (BLUE, "all right (solve-all)")], y(0.62))
    return areas + frame("Groups of 8 answers to one question", last) + key


def frame(title: str, last: int) -> str:
    """Title, axes and their numbers."""
    rows = "".join(
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(v)}" y2="{y(v)}" stroke="{GRID}" stroke-width="0.7"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4}" text-anchor="end">{v:.0%}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1.0)
    )
    columns = "".join(
        f'<text x="{x(s, last)}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{s}</text>'
        for s in range(0, last + 1, max(1, last // 4))
    )
    return (
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{title}</text>{rows}{columns}'
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">step</text>'
    )


def legend(entries: Sequence[tuple[str, str]], top: float = TOP + 8) -> str:
    """Colours and what they stand for, on the right."""
    return "".join(
        f'<g transform="translate({LEFT + WIDTH - 210},{top + 18 * i})"><rect width="214" height="18" fill="white" '
        f'fill-opacity="0.8"/><rect x="6" y="4" width="10" height="10" fill="{colour}"/>'
        f'<text x="22" y="13">{text}</text></g>'
        for i, (colour, text) in enumerate(entries)
    )


def x(step: float, last: int) -> float:
    return LEFT + WIDTH * step / last


def y(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
