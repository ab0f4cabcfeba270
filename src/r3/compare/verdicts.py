"""Verdicts on the claims in a comparison's plan.

A claim is supported where the whole interval lies on its side, contradicted where all of it lies on the other side, and
open in between.
"""

from __future__ import annotations

import math

from r3.compare.analysis import Comparison
from r3.compare.claims import Claim, parse
from r3.compare.tables import Table, percent, times
from r3.evaluate.passk import Estimate


def claims_table(comparison: Comparison) -> Table | None:
    """The table of claims and verdicts; None without claims."""
    judged = judged_claims(comparison)
    if not judged:
        return None
    return Table(
        "What was claimed, and what was measured",
        ["claim", "measured", "the interval", "said"],
        [[claim["claim"], claim["measured"], claim["verdict"], claim["said"]] for claim in judged],
        "Of pass@1 and pass@k the difference of the final values, in percentage points; of tokens those to the other "
        "method's final pass@1, as a share of its own. Supported: the whole 95 % interval lies on the claim's side; "
        "contradicted: all of it on the other side; open: neither. It is not corrected for the number of claims.",
    )


def judged_claims(comparison: Comparison) -> list[dict[str, str]]:
    """Every claim of the plan with what was measured and the verdict, in words."""
    c = comparison
    judged = []
    for said in c.plan.get("claims", []):
        claim = parse(said["claim"], list(c.plan["variants"]), c.k)
        when = "before the runs" if said["before"] else "after results were there"
        measured, verdict = _measured(c, claim)
        judged.append({"claim": claim.text, "measured": measured, "verdict": verdict, "said": when})
    return judged


def _measured(c: Comparison, claim: Claim) -> tuple[str, str]:
    there = claim.ours in c.names and claim.theirs in c.names and bool(c.shared_seeds(claim.ours, claim.theirs))
    if not there:
        return "–", "not measured yet"
    if claim.metric == "tokens":
        estimate, bound = c.token_ratio(claim.ours, claim.theirs).ratio, claim.factor
        measured = times(estimate)
    else:
        estimate, bound = c.test(claim.ours, claim.theirs, claim.metric).difference, 0.0
        measured = percent(estimate)
    return measured, "no fresh seeds: no evidence" if c.exploratory else verdict(estimate, bound, more=claim.more)


def verdict(estimate: Estimate, bound: float, *, more: bool) -> str:
    """Whether the interval supports that the value is above the bound (`more`), or below it.

    >>> [verdict(Estimate(0.5, low, high), 1.0, more=False) for low, high in [(0.4, 0.9), (0.4, 1.2), (1.1, 1.2)]]
    ['supported', 'open', 'contradicted']
    """
    if math.isnan(estimate.value):
        return "not measurable"  # the other method never rose to the level
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return "no interval: run more seeds"
    above, below = estimate.low > bound, estimate.high < bound
    if above or below:
        return "supported" if above == more else "contradicted"
    return "open"
