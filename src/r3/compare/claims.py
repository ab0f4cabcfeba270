"""A user's claims: made before a comparison, judged in its report.

    r3 > grpo                  r3 ends with a higher held-out pass@1 than grpo
    r3 > grpo in pass@4        the same of pass@4, where the recipe draws four answers to a problem
    r3 < grpo in tokens        r3 reaches grpo's final pass@1 with fewer tokens than grpo itself
    r3 < 0.7 grpo in tokens    … with less than 0.7 times as many

This is how a claim is written and kept in the plan; `tables` has the verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.errors import ConfigError

SHAPE = re.compile(r"([\w.-]+)\s*([<>])\s*(?:(\d+(?:\.\d+)?)\s*[×x*]?\s+)?([\w.-]+)(?:\s+in\s+(\S+))?")


@dataclass(frozen=True, slots=True)
class Claim:
    """`ours` against `theirs`, in a metric: more of it, or less."""

    text: str
    ours: str
    theirs: str
    metric: str
    more: bool
    factor: float = 1.0
    """The share of theirs that ours stays below, for tokens."""


def parse(text: str, variants: Sequence[str], k: int) -> Claim:
    """The claim that the text makes of these variants, evaluated with `k` answers to a problem.

    >>> claim = parse("r3 < 0.7 grpo in tokens", ["grpo", "r3"], 4)
    >>> claim.ours, claim.theirs, claim.metric, claim.more, claim.factor
    ('r3', 'grpo', 'tokens', False, 0.7)
    """
    said = f"--claim {text!r}"
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{said}: write 'r3 > grpo', 'r3 > grpo in pass@{k}' or 'r3 < 0.7 grpo in tokens'")
    ours, sign, factor, theirs, metric = match.groups(default="")
    if strange := [name for name in (ours, theirs) if name not in variants]:
        raise ConfigError(f"{said}: {strange[0]} is none of the variants: {', '.join(variants)}")
    if ours == theirs:
        raise ConfigError(f"{said} compares {ours} with itself; name two variants")
    known = list(dict.fromkeys(["pass@1", f"pass@{k}", "tokens"]))
    if (metric := metric or "pass@1") not in known:
        raise ConfigError(f"{said}: no metric {metric!r}; there are {', '.join(known)} (pass@k of evaluate.samples)")
    if factor and metric != "tokens":
        raise ConfigError(f"{said}: a factor is for tokens; of {metric} say which is higher")
    return Claim(" ".join(text.split()), ours, theirs, metric, sign == ">", float(factor or 1))


def planned(claims: Sequence[str], known: Sequence[dict[str, Any]], *, before: bool) -> list[dict[str, Any]]:
    """A plan's claims followed by new ones; a claim that is there already stays unchanged."""
    claims_by_text = {claim["claim"]: claim for claim in known}
    for text in (" ".join(claim.split()) for claim in claims):
        claims_by_text.setdefault(text, {"claim": text, "before": before})
    return list(claims_by_text.values())
