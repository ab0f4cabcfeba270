"""From findings to what is expected to pay, and the advised settings. `docs/probe.md` gives the reasons.

A mechanism that costs generated tokens or moves the policy is advised only when its interval leaves nothing open;
replay, which costs none, on its point estimate.

`show` prints a probe's report in the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from r3.config import Config, changes, validate
from r3.evaluate.passk import Estimate
from r3.probe.findings import SERR, Findings
from r3.train.record import FAILURES, MOST_FAILURES

LEAST_REPLAY = 0.01
"""Replay is expected to pay when at least this share of queries would have a success to replay an epoch later."""
LEAST_LIFT = 2.0
"""Reflection is expected to pay when it is right at least this many times as often, and its interval excludes 1."""
CHANCE = 0.5
"""The AUC of a random order."""
LEAST_LATE = 0.02
"""A doubled length limit is worth trying when accuracy would rise by at least this much."""
MOST_UNIFORM = 0.9
"""Above this share of solve-none (or solve-all) groups, hardly any group teaches."""

Pays = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether one mechanism is expected to pay, and why."""

    about: str
    pays: Pays
    reason: str


def advise(findings: Findings, config: Config) -> tuple[Advice, ...]:
    """A line for each mechanism, and for anything else worth knowing before a long run."""
    reflection = _reflection(findings)
    return (
        _replay(findings, lifted=reflection.pays == "yes"),
        reflection,
        _ranking(findings, config),
        _twice(findings),
        *_remarks(findings, lifted=reflection.pays == "yes"),
    )


def _replay(findings: Findings, *, lifted: bool) -> Advice:
    success = findings.replay["success"]
    if success.value >= LEAST_REPLAY:
        reason = f"{_percent(success)} of queries would have a success to replay when met again"
        return Advice("replay", "yes", reason)
    reason = f"only {_percent(success)} of queries would have a success to replay when met again"
    if lifted:
        return Advice("replay", "yes", f"{reason}, but it brings what reflection finds to the plain prompt")
    return Advice("replay", "no", f"{reason}; it costs no generated tokens and may stay on")


def _reflection(findings: Findings) -> Advice:
    lift = findings.lift
    if lift is None:
        why = ", ".join(f"{reason} {count}" for reason, count in findings.refused.items())
        if not findings.hard:
            return Advice(
                "reflection", "no", f"each of {findings.queries} queries was solved: there is none to reflect on"
            )
        return Advice("reflection", "unknown", f"no reflection answer was drawn ({why or 'no room in the budget'})")
    told = f"right {_times(lift.ratio)} as often as plain answers to the same {lift.queries} unsolved queries"
    if lift.ratio.low > 1 and lift.ratio.value >= LEAST_LIFT:
        return Advice("reflection", "yes", told)
    if lift.ratio.high < LEAST_LIFT:
        return Advice("reflection", "no", f"{told}: no lift of {LEAST_LIFT:g} times")
    return Advice("reflection", "unknown", f"{told}: a lift of {LEAST_LIFT:g} times is not shown; draw more --tokens")


def _ranking(findings: Findings, config: Config) -> Advice:
    auc = findings.ranking.auc.get(SERR)
    if config.method.mask_truncated:
        return Advice("ranking", "no", "method.mask_truncated leaves out the very answers that it ranks")
    if auc is None:
        return Advice("ranking", "unknown", _no_order(findings))
    told = f"its order has an AUC of {_interval(auc)} for finishing right ({findings.ranking.pairs} pairs)"
    if auc.low > CHANCE:
        return Advice("ranking", "yes", told)
    if findings.ranking.pairs and auc.high - auc.low == 1.0:
        return Advice("ranking", "unknown", f"{told}, of only {findings.ranking.queries} queries")
    return Advice("ranking", "no", f"{told}: " + ("worse than chance" if auc.high < CHANCE else "may be chance"))


def _no_order(findings: Findings) -> str:
    if findings.at_twice.no_room and not findings.at_twice.carried_on:
        return "the model's context has no room to carry truncated answers on to twice the limit"
    if not findings.at_twice.carried_on:
        return "no truncated answer was carried on, so there is nothing to rank"
    return "no query has both a truncated answer that finishes right and one that does not"


def _twice(findings: Findings) -> Advice:
    late, limit = findings.at_twice, findings.limit
    if late.finish_right is None or late.accuracy is None:
        return Advice("twice the limit", "unknown", "no truncated answer was carried on")
    plain = findings.pass_at[1].value
    gain = [findings.truncated.value * share for share in (late.finish_right.low, late.finish_right.high)]
    told = (
        f"{_percent(late.finish_right)} of truncated answers are right at {2 * limit:,} tokens: accuracy "
        f"{plain:.1%} → {late.accuracy:.1%}"
    )
    return Advice(
        "twice the limit", "yes" if gain[0] >= LEAST_LATE else "no" if gain[1] < LEAST_LATE else "unknown", told
    )


def _remarks(findings: Findings, *, lifted: bool) -> list[Advice]:
    remarks = []
    for which, hint in (
        ("none", "a warm start (r3 sft), easier problems or a longer limit come first"),
        ("all", "harder problems would teach more"),
    ):
        if findings.solve[which].value > MOST_UNIFORM and not (which == "none" and lifted):
            remarks.append(Advice("data", "no", f"{_percent(findings.solve[which])} of groups solve {which}: {hint}"))
    failed = {reason: findings.reasons[reason] for reason in FAILURES if reason in findings.reasons}
    if sum(failed.values()) > MOST_FAILURES * findings.answers:
        counts = ", ".join(f"{reason} {count}" for reason, count in failed.items())
        remarks.append(
            Advice("verifier", "no", f"it gave up on {sum(failed.values())} of {findings.answers} answers ({counts})")
        )
    return remarks


def settings(advice: tuple[Advice, ...], findings: Findings) -> dict[str, Any]:
    """The advised settings, to be laid over the recipe. What is unknown is off until it is shown to pay."""
    pays = {line.about: line.pays for line in advice}
    method: dict[str, Any] = {"replay": {"enabled": True}}
    if pays["reflection"] == "yes":
        method["reflection"] = {
            "enabled": True,
            "budget": "shared",
            "at_once": True,
            "window": 2 * findings.group_size,
            "min_lift": LEAST_LIFT,
        }
    else:
        method["reflection"] = {"enabled": False}
    method["ranking"] = {"enabled": pays["ranking"] == "yes"}
    follow: dict[str, Any] = {"method": method}
    if pays["twice the limit"] == "yes":
        follow["evaluate"] = {"max_tokens": 2 * findings.limit}
    return follow


def laid_over(config: Config, following: dict[str, Any]) -> str:
    """The whole recipe with these settings, as YAML."""
    tree = config.model_dump(mode="json")
    for section, values in following.items():
        for name, value in values.items():
            tree[section][name] = {**tree[section][name], **value} if isinstance(value, dict) else value
    return changes(validate(tree)) + "\n"


def _percent(share: Estimate) -> str:
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _interval(value: Estimate) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _times(ratio: Estimate) -> str:
    return f"{ratio.value:.1f} times [{ratio.low:.1f}, {many(ratio.high)}]"


def many(times: float) -> str:
    """A ratio's upper end, capped: it has no meaning where the other side was hardly ever right."""
    return f"{times:.1f}" if times < 1000 else "over 1,000"


def show(console: Console, findings: Findings, advice: tuple[Advice, ...], follow: dict[str, Any], head: str) -> None:
    """Print the tables, what is expected to pay, and the advised settings."""
    console.print(head, markup=False)
    for table in (_groups(findings), _answers(findings), _lift(findings), _ranking_rows(findings), _advice(advice)):
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


def _ranking_rows(findings: Findings) -> Table:
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
