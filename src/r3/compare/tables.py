"""The report's tables, as plain text cells that Markdown and HTML both print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from r3.compare.analysis import Comparison
from r3.compare.plan import seed_list
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
