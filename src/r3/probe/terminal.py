"""A probe's report in the terminal."""

from __future__ import annotations

from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from r3.evaluate.passk import Estimate
from r3.probe.advice import Advice, many
from r3.probe.findings import Findings


def show(console: Console, findings: Findings, advice: tuple[Advice, ...], follow: dict[str, Any], head: str) -> None:
    """Print the tables, what is expected to pay, and the advised settings."""
    console.print(head, markup=False)
    for table in (_groups(findings), _answers(findings), _lift(findings), _ranking(findings), _advice(advice)):
        title, table.title = table.title, None  # rich breaks a title to the table's width
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(table)
    console.print("Advised settings:\n", markup=False)
    console.print(snippet(follow), markup=False, highlight=False)


def snippet(follow: dict[str, Any]) -> str:
    """The settings as YAML; a section with nothing but its switch becomes on or off."""
    text = yaml.safe_dump(follow, sort_keys=False)
    return str(text)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _groups(findings: Findings) -> Table:
    table = _table(
        f"Groups of {findings.group_size} answers to {findings.queries} training queries", "", "share", "95 %"
    )
    for which, share in findings.solve.items():
        table.add_row(f"{'mixed' if which == 'mixed' else f'solve {which}'}", *_share(share))
    for k, passed in findings.pass_at.items():
        table.add_row(f"pass@{k}", *_share(passed))
    table.add_row("solve none, with a past success to replay", *_share(findings.replay["success"]))
    table.add_row("solve all, with a past failure to replay", *_share(findings.replay["failure"]))
    table.add_row("truncated answers", *_share(findings.truncated))
    return table


def _answers(findings: Findings) -> Table:
    table = _table(f"{findings.answers:,} plain answers of at most {findings.limit:,} tokens", "", "")
    for name, label in (("mean", "mean length"), ("median", "median length"), ("mean_right", "mean length if right")):
        length = findings.lengths[name]
        table.add_row(label, "–" if length is None else f"{length:,.1f}")
    for reason, count in findings.reasons.items():
        table.add_row(f"verdict: {reason}", f"{count:,}")
    return table


def _lift(findings: Findings) -> Table:
    lift = findings.lift
    title = f"Lift of reflection: {findings.hard} of {findings.queries} queries never solved"
    table = _table(title, "answers to them", "right", "share", "95 %", "tokens per right answer")
    if lift is None:
        return table
    for side, (kind, rate) in enumerate((("plain", lift.plain), ("after a shown failure", lift.reflection))):
        cost = lift.tokens_per_right[side]
        counted = f"{lift.right[side]:,} of {lift.answers:,}"
        table.add_row(kind, counted, *_share(rate, 2), "–" if cost is None else f"{cost:,.0f}")
    table.add_row("ratio", "", f"{lift.ratio.value:.1f}", f"{lift.ratio.low:.1f} … {many(lift.ratio.high)}", "")
    for why, count in findings.refused.items():
        table.add_row(f"no reflection prompt: {why}", f"{count:,}", "", "", "")
    return table


def _ranking(findings: Findings) -> Table:
    ranking, twice = findings.ranking, findings.at_twice
    longest = 2 * findings.limit
    title = f"Information in the ranking: {twice.carried_on:,} truncated answers carried on to {longest:,} tokens"
    table = _table(title, "order of a query's truncated answers", "AUC", "95 %", "pairs", "queries")
    for name, auc in ranking.auc.items():
        table.add_row(name, *_plain(auc), f"{ranking.pairs:,}", f"{ranking.queries:,}")
    if ranking.at_half is not None:
        counts = (f"{ranking.pairs_at_half:,}", f"{ranking.queries_at_half:,}")
        table.add_row("SERR's order at half the limit", *_plain(ranking.at_half), *counts)
    if twice.finish_right is not None:
        table.add_row("right at twice the limit (share)", *_share(twice.finish_right), "", "")
    if twice.no_room:
        table.add_row("no room in the context", f"{twice.no_room:,}", "", "", "")
    return table


def _advice(advice: tuple[Advice, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Expected to pay", pad_edge=False, show_header=False)
    for line in advice:
        table.add_row(line.about, line.pays, line.reason)
    return table


def _share(share: Estimate, digits: int = 1) -> tuple[str, str]:
    return f"{share.value:.{digits}%}", f"{share.low:.{digits}%} … {share.high:.{digits}%}"


def _plain(value: Estimate) -> tuple[str, str]:
    return f"{value.value:.2f}", f"{value.low:.2f} … {value.high:.2f}"
