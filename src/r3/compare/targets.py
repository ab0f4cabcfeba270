"""The claims that this project set itself before the runs, beside what a comparison measured."""

from __future__ import annotations

import math

from r3.compare.analysis import Comparison
from r3.compare.statistics import mean_interval
from r3.compare.tables import Table, percent, times

TOKENS = {"grpo": 0.5, "dapo": 0.7}
"""Claim: R³ reaches their final pass@1 with at most this share of their tokens, and the interval excludes 1."""
SOLVE_NONE = 0.5
"""Claim: at the end, R³'s share of solve-none groups is at most this much of GRPO's."""
ABLATIONS = ("r3-no-replay", "r3-no-reflection", "r3-no-ranking")


def targets_of(comparison: Comparison) -> Table | None:
    """The table of claims; None if the comparison has no R³ or no fresh seeds."""
    c = comparison
    if "r3" not in c.names or c.exploratory:
        return None
    rows = [_tokens(c, name, share) for name, share in TOKENS.items() if _paired(c, name)]
    if _paired(c, "grpo"):
        rows.append(_solve_none(c))
    rows.append(_kept(c))
    rows += [_ablation(c, name) for name in ABLATIONS if _paired(c, name)]
    return Table(
        "What was to be shown, and what was",
        ["claim", "measured", "shown?"],
        rows,
        "On the fresh seeds alone. The claims were set before the runs. 'Shown' asks for the number and for an "
        "interval that excludes no difference; 'number only' is the number alone.",
    )


def _paired(c: Comparison, name: str) -> bool:
    return name in c.names and bool(c.shared_seeds("r3", name))


def _verdict(number: bool, interval: bool) -> str:
    return "shown" if number and interval else "number only" if number else "not shown"


def _tokens(c: Comparison, name: str, share: float) -> list[str]:
    ratio = c.token_ratio("r3", name).ratio
    shown = _verdict(ratio.value <= share, ratio.high < 1)
    shown += " (not of DAPO as published)" if c.masked(name) else ""
    return [f"R³ reaches {c.label(name)}'s final pass@1 with at most {share}× its tokens", times(ratio), shown]


def _solve_none(c: Comparison) -> list[str]:
    ours, theirs = (c.edge(name, "solve_none", last=True).value for name in ("r3", "grpo"))
    ratio = ours / theirs if theirs > 0 else math.nan
    text = f"{100 * ours:.1f} % against {100 * theirs:.1f} % ({ratio:.2f}×)"
    claim = f"solve-none groups at the end at most {SOLVE_NONE}× of grpo's"
    return [claim, text, "number only" if ratio <= SOLVE_NONE else "not shown"]


def _kept(c: Comparison) -> list[str]:
    """pass@k after training against before, seed by seed: a policy that only sharpens would lose some of it."""
    metric = c.metrics[-1]
    curves = c.curves("r3", metric)
    change = mean_interval(curves[:, :, -1] - curves[:, :, 0])
    claim = f"held-out {metric} not lower than at the start (points)"
    return [claim, percent(change), _verdict(change.value >= 0, change.low > 0)]


def _ablation(c: Comparison, name: str) -> list[str]:
    lost = c.test("r3", name, "pass@1").difference
    claim = f"{name} loses final pass@1 against R³ (points lost)"
    return [claim, percent(lost), _verdict(lost.value > 0, lost.low > 0)]
