"""The report's tables, as plain text cells that Markdown and HTML both print.

`judged_claims` has the verdicts on the claims in a comparison's plan: a claim is supported where the whole interval
lies on its side, contradicted where all of it lies on the other side, and open in between. `targets_of` has the claims
that this project set itself before the runs, beside what a comparison measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from r3.compare.analysis import Comparison
from r3.compare.plan import seed_list
from r3.compare.records import Claim, parse
from r3.compare.statistics import mean_interval
from r3.evaluate.passk import Estimate


@dataclass(frozen=True, slots=True)
class Table:
    """A table with what to know when reading it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def tables_of(comparison: Comparison) -> list[Table]:
    c = comparison
    if c.exploratory:
        return [_looked_at(c), _groups(c), _work(c)]
    tables = [_accuracy(c), _tokens(c), _groups(c), _work(c)]
    tables += [_tests(c)] if len(c.names) > 1 else []
    return tables if c.looked_at is None else [*tables, _looked_at(c.looked_at)]


def percent(estimate: Estimate) -> str:
    """A share with its interval.

    >>> percent(Estimate(0.123, 0.1, 0.15)), percent(Estimate(0.5, math.nan, math.nan))
    ('12.3 [10.0, 15.0]', '50.0')
    """
    if math.isnan(estimate.value):
        return "–"
    interval = "" if math.isnan(estimate.low) else f" [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"{100 * estimate.value:.1f}{interval}"


def times(estimate: Estimate) -> str:
    """A ratio with its interval; infinity is a level that was not reached.

    >>> times(Estimate(0.4, 0.3, math.inf)), times(Estimate(math.inf, 1.0, math.inf))
    ('0.40× [0.30, not reached]', 'not reached [1.00, not reached]')
    """
    if math.isnan(estimate.value):
        return "–"

    def one(value: float, mark: str = "") -> str:
        return "not reached" if math.isinf(value) else f"{value:.2f}{mark}"

    interval = "" if math.isnan(estimate.low) else f" [{one(estimate.low)}, {one(estimate.high)}]"
    return one(estimate.value, "×") + interval


def _over(c: Comparison) -> str:
    """Says what the intervals are over."""
    return "over seeds and problems" if c.by_problem else "over seeds only (there are no results of each problem)"


def _masked(c: Comparison) -> str:
    if not any(c.masked(name) for name in c.names):
        return ""
    return (
        " Truncated masked: DAPO with truncated answers masked out of the loss (not the published recipe, which has a "
        "penalty for long answers); it does not learn to stop, and no claim to be ahead of DAPO can rest on it."
    )


def _accuracy(c: Comparison) -> Table:
    rows = [
        [
            c.label(name),
            str(len(c.seeds(name))),
            percent(c.start(name, "pass@1")),
            *(percent(part(name, metric)) for metric in c.metrics for part in (c.final, c.best)),
        ]
        for name in c.names
    ]
    header = ["method", "seeds", "pass@1 at the start"]
    header += [f"{when} {metric}" for metric in c.metrics for when in ("final", "best")]
    return Table(
        "Held-out accuracy (%)",
        header,
        rows,
        f"{c.problems} held-out problems, {c.k} answer{'s' if c.k > 1 else ''} each, under the plain prompt. Mean over "
        f"seeds with the 95 % t interval {_over(c)}. Final: at the token budget exactly. Best: of each seed's "
        "evaluations, so higher than the truth by the luck of the best of many, with the interval over seeds."
        + _masked(c),
    )


def _tokens(c: Comparison) -> Table:
    references = c.references()
    rows = []
    for name in c.names:
        row = [c.label(name), f"{c.total(name, 'tokens/generated'):,.0f}", f"{c.total(name, 'steps'):.0f}"]
        for reference in references:
            if name == reference or not c.shared_seeds(name, reference):
                row += ["–", "–"]
                continue
            needed = c.token_ratio(name, reference)
            row += [_count(needed.tokens), times(needed.ratio)]
        rows.append(row if c.level is None else [*row, _count(c.tokens_to(name, c.level))])
    header = ["method", "tokens generated", "steps"]
    for reference in references:
        header += [f"tokens to {c.label(reference)}'s final pass@1", f"as a share of {c.label(reference)}'s own"]
    header += [] if c.level is None else [f"tokens to {c.level:.1%}"]
    return Table(
        "Tokens to reach the same accuracy",
        header,
        rows,
        "Where the mean curve over seeds first reaches the other method's final value, by straight lines between "
        f"evaluations. Intervals: 95 % percentile bootstrap {_over(c)}, drawn alike for both methods; with so few "
        "seeds they are too narrow. Not reached: not within the budget.",
    )


def _count(tokens: float) -> str:
    return "not reached" if math.isinf(tokens) else f"{tokens:,.0f}"


def _groups(c: Comparison) -> Table:
    def trend(name: str, series: str) -> list[str]:
        return [percent(c.edge(name, series, last=last)) for last in (False, True)]

    rows = [
        [
            c.label(name),
            *trend(name, "accuracy"),
            *trend(name, "solve_none"),
            percent(c.edge(name, "solve_all", last=True)),
            *trend(name, "truncated"),
            *(f"{c.edge(name, 'entropy', last=last).value:.3f}" for last in (False, True)),
        ]
        for name in c.names
    ]
    header = ["method", "accuracy, start", "accuracy, end", "solve-none, start", "solve-none, end", "solve-all, end"]
    return Table(
        "In training: accuracy, groups that teach nothing by themselves, truncation (%), entropy (nats per token)",
        [*header, "truncated, start", "truncated, end", "entropy, start", "entropy, end"],
        rows,
        "On the training problems under the plain prompt, over the first and the last tenth of the budget, resampled "
        "groups included. Where accuracy here rises much more than the held-out one, the problems were memorised.",
    )


def _work(c: Comparison) -> Table:
    def count(name: str, key: str) -> str:
        return f"{c.total(name, key):,.0f}"

    rows = [
        [
            c.label(name),
            f"{count(name, 'replay/samples')} in {count(name, 'replay/joined')} "
            f"({count(name, 'replay/cross_context')})",
            f"{count(name, 'groups/reflection')} ({count(name, 'reflection/solved')})",
            f"{count(name, 'ranking/samples')} in {count(name, 'ranking/groups')}",
            f"{count(name, 'groups/teaching')} of {count(name, 'groups')}",
            f"{c.total(name, 'seconds/step'):.0f} s",
        ]
        for name in c.names
    ]
    return Table(
        "What each mechanism did, and the time it took",
        [
            "method",
            "replayed answers in groups (found in reflection)",
            "reflection groups (with a right answer)",
            "ranked answers in groups",
            "groups that taught",
            "time in steps",
        ],
        rows,
        "Means over seeds. Time is that of the training steps, without evaluation, on whatever else the machine did.",
    )


def _tests(c: Comparison) -> Table:
    rows = []
    for ours, theirs in c.pairs():
        if not c.shared_seeds(ours, theirs):
            continue
        for metric in c.metrics:
            test = c.test(ours, theirs, metric)
            p = f"{test.p_sign_flip:.3g} (least possible {test.p_least:.3g})"
            rows.append([f"{c.label(ours)} − {c.label(theirs)}", metric, str(test.seeds), percent(test.difference), p])
    return Table(
        "Paired tests of the final values (percentage points)",
        ["difference", "metric", "seeds", "mean difference, 95 % t interval", "exact sign-flip p"],
        rows,
        "Seed by seed: variants of one seed share the queries' order, the held-out problems and the evaluation's "
        f"random numbers. Intervals {_over(c)}; they take the differences for normal. The sign-flip test takes nothing "
        "for granted, but with n seeds its p cannot be below 2/2ⁿ, so five seeds or fewer cannot reject at 5 %. "
        "Neither is corrected for the number of comparisons.",
    )


def _looked_at(c: Comparison) -> Table:
    """The seeds that no claim is made from, in one table."""
    references = c.references()
    rows = []
    for name in c.names:
        row = [c.label(name), str(len(c.seeds(name)))]
        row += [percent(part(name, "pass@1")) for part in (c.start, c.final)]
        for reference in references:
            apart = name == reference or not c.shared_seeds(name, reference)
            row.append("–" if apart else times(c.token_ratio(name, reference).ratio))
        rows.append(row)
    header = ["method", "seeds", "pass@1 at the start", "final pass@1"]
    header += [f"tokens to {c.label(name)}'s final pass@1" for name in references]
    return Table(
        f"Looked at: {seed_list(c.plan['seeds'])}, which settings were chosen on",
        header,
        rows,
        f"Told for completeness, evidence for nothing: methods were tuned on these seeds. Intervals {_over(c)}."
        + _masked(c),
    )


# ----------------------------------------------------------- verdicts on claims


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


# ---------------------------------------------------- this project's own claims


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
    rows = [_token_target(c, name, share) for name, share in TOKENS.items() if _paired(c, name)]
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


def _token_target(c: Comparison, name: str, share: float) -> list[str]:
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
