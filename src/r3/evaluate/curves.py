"""The paper's two curves: pass@k over k, and pass@k over the length limit, as numbers, PNG and SVG.

Limits below the one that answers were drawn with need no new answers: one that is longer than the limit would have been
cut there, so it counts as wrong; the others are as they would have been.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.evaluate.passk import Estimate, estimate
from r3.evaluate.results import Problems, pass_scores
from r3.run.disk import write_atomically

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers tell the lines apart in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")
ALL = "all problems"


def line_style(place: int) -> dict[str, Any]:
    """How the n-th line of a figure looks: unlike any of the twenty before it.

    >>> line_style(0)["linestyle"], line_style(7)["linestyle"]
    ('-', '--')
    """
    kind = place % len(COLOURS)
    return {"color": COLOURS[kind], "marker": MARKERS[kind], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure: a line for each benchmark, and one over the problems of all."""

    name: str
    """Formats of the files."""
    across: str
    up: str
    lines: Mapping[str, Mapping[int, Estimate]]

    def as_dict(self) -> dict[str, Any]:
        lines = {label: {str(x): y.as_dict() for x, y in line.items()} for label, line in self.lines.items()}
        return {"x": self.across, "y": self.up, "lines": lines}


def curve_over_k(answers: Mapping[str, Problems], ks: Sequence[int], *, seed: int) -> Curve:
    """pass@k for each k."""
    lines = {
        label: {k: estimate(pass_scores(problems, k), seed=seed) for k in sorted(set(ks))}
        for label, problems in _lines(answers).items()
    }
    return Curve("pass_at_k", "k, answers per problem", "pass@k (%)", lines)


def curve_over_limits(answers: Mapping[str, Problems], limits: Sequence[int], *, k: int, seed: int) -> Curve:
    """pass@k for each limit on the length of an answer."""
    lines = {
        label: {limit: estimate(pass_scores(problems, k, limit), seed=seed) for limit in sorted(set(limits))}
        for label, problems in _lines(answers).items()
    }
    return Curve("pass_by_limit", "longest response (tokens)", f"pass@{k} (%)", lines)


def _lines(answers: Mapping[str, Problems]) -> dict[str, Problems]:
    if len(answers) < 2:
        return dict(answers)
    return {**answers, ALL: [one for problems in answers.values() for one in problems]}


def require_matplotlib() -> None:
    """Refuse before the answers are drawn, not hours after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TaskError("curves need matplotlib: pip install 'r3-rl[plots]'") from error


def write_curves(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """`curves.json`, and each curve as PNG and SVG; the files written."""
    numbers = folder / "curves.json"
    data = {curve.name: curve.as_dict() for curve in curves}
    write_atomically(numbers, (json.dumps(data, indent=2) + "\n").encode())
    return [numbers, *(path for curve in curves for path in _plot(curve, folder))]


def _plot(curve: Curve, folder: Path) -> list[Path]:
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window system is asked for, and nothing of it outlives this function.
    with rc_context({"svg.hashsalt": "r3", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for place, (label, line) in enumerate(curve.lines.items()):
            xs = list(line)
            style = line_style(place)
            axes.plot(xs, [100 * line[x].value for x in xs], markersize=4, label=label, **style)
            lows, highs = ([100 * getattr(line[x], end) for x in xs] for end in ("low", "high"))
            axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        _label(axes, curve)
        # The same numbers are the same bytes: no date in the SVG.
        paths = [folder / f"{curve.name}.png", folder / f"{curve.name}.svg"]
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _label(axes: Any, curve: Curve) -> None:
    from matplotlib.ticker import NullLocator

    xs = sorted({x for line in curve.lines.values() for x in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(curve.across)
    axes.set_ylabel(f"{curve.up}, 95 % interval shaded")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
