"""The figures: a line for each variant over generated tokens, with its 95 % interval shaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.compare.analysis import Band, Comparison
from r3.evaluate.curves import COLOURS, MARKERS, require_matplotlib

FORMATS = ("svg", "png")


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
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    axes.plot(xs, [scale * p.value for p in band.points], color=colour, marker=marker, markersize=3, label=label)
    if not any(math.isnan(p.low) for p in band.points):  # one seed has no interval
        lows, highs = ([scale * getattr(p, end) for p in band.points] for end in ("low", "high"))
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)
