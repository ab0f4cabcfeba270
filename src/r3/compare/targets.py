"""What a comparison was to show, beside what it showed: the claims that this project set itself, with numbers."""

from __future__ import annotations

import math

from r3.compare.analysis import Comparison
from r3.compare.statistics import mean_interval
from r3.compare.tables import Table, percent, times

TOKENS = {"grpo": 0.5, "dapo": 0.7}
"""R³ is to reach their final pass@1 with at most this share of their tokens, with an interval that excludes 1."""
SOLVE_NONE = 0.5
"""R³'s share of solve-none groups at the end, at most, of GRPO's."""
ABLATIONS = ("r3-no-replay", "r3-no-reflection", "r3-no-ranking")


def targets_of(comparison: Comparison) -> Table | None:
    """The table of claims; None where the comparison has no R³ to make them of, or no fresh seeds."""
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
    found = c.token_ratio("r3", name).ratio
    shown = _verdict(found.value <= share, found.high < 1)
    shown += " (not of DAPO as published)" if c.masked(name) else ""
    return [f"R³ reaches {c.label(name)}'s final pass@1 with at most {share}× its tokens", times(found), shown]


def _solve_none(c: Comparison) -> list[str]:
    ours, theirs = (c.edge(name, "solve_none", last=True).value for name in ("r3", "grpo"))
    ratio = ours / theirs if theirs > 0 else math.nan
    text = f"{100 * ours:.1f} % against {100 * theirs:.1f} % ({ratio:.2f}×)"
    claim = f"solve-none groups at the end at most {SOLVE_NONE}× of grpo's"
    return [claim, text, "number only" if ratio <= SOLVE_NONE else "not shown"]


def _kept(c: Comparison) -> list[str]:
    """pass@k after training against before, seed by seed: a policy that only sharpens would lose some."""
    metric = c.metrics[-1]
    curves = c.curves("r3", metric)
    found = mean_interval(curves[:, :, -1] - curves[:, :, 0])
    claim = f"held-out {metric} not lower than at the start (points)"
    return [claim, percent(found), _verdict(found.value >= 0, found.low > 0)]


def _ablation(c: Comparison, name: str) -> list[str]:
    found = c.test("r3", name, "pass@1").difference
    claim = f"{name} loses final pass@1 against R³ (points lost)"
    return [claim, percent(found), _verdict(found.value > 0, found.low > 0)]
