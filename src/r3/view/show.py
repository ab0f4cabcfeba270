"""`r3 show`: a run in the terminal.

Model text is made safe to show: characters that control a terminal or reverse a line are made visible (`visible`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from r3.errors import NotThere, ViewError
from r3.run.display import format_value, sparkline
from r3.view.runs import ViewedRun, open_runs
from r3.view.steps import origin_of

ROWS = (
    ("accuracy", "accuracy"),
    ("accuracy under reflection", "accuracy/reflection"),
    ("held-out accuracy", "heldout/accuracy"),
    ("reward", "reward"),
    ("solve-none", "solve_none"),
    ("solve-all", "solve_all"),
    ("truncated", "truncated"),
    ("entropy", "entropy"),
    ("tokens per answer", "length/mean"),
    ("replayed answers", "replay/samples"),
    ("their mean age", "replay/age_mean"),
    ("reflection groups", "groups/reflection"),
    ("ranked answers", "ranking/samples"),
    ("groups that taught", "groups/teaching"),
    ("tokens/s", "tokens_per_second"),
    ("seconds per step", "seconds/step"),
)
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"


def show_run(path: Path) -> str:
    """The summary: one line per metric, with its first value, a small curve and its last value."""
    run = open_runs([path])[0]
    state, about = run.state(), run.about()
    step = "none yet" if state["step"] is None else state["step"]
    planned = f" of {state['planned']}" if state["planned"] else ""
    lines = [
        f"{_bold('Run')}     {visible(str(path))}",
        f"{_bold('Status')}  {state['status']}, step {step}{planned}",
        f"{_bold('What')}    {about['method'] or '?'} on {about['task'] or '?'}, model {about['model'] or '?'}, "
        f"seed {about['seed'] if about['seed'] is not None else '?'}",
        *(f"{_bold('Note')}    {visible(problem)}" for problem in state["problems"]),
        "",
    ]
    rewards = [(f"held-out {key[8:]}", key) for key in sorted(run.metrics.columns) if key.startswith("heldout/reward/")]
    rows = [row for row in (_metric_row(run, label, key) for label, key in (*ROWS, *rewards)) if row is not None]
    if not rows:
        return "\n".join([*lines, "No steps yet."])
    lines += _table(("metric", "first", "course", "last"), rows, right=(1, 3))
    lines += ["", *_saved_line(run, path)]
    return "\n".join(lines)


def show_group(path: Path, which: str) -> str:
    """Every answer of a query's groups at a step."""
    run = open_runs([path])[0]
    text, _, query = which.partition("/")
    if not text.isdigit() or not query:
        raise ViewError(f"--group {visible(which)}: give STEP/QUERY, e.g. --group 12/{_some_query(run) or 'QUERY'}")
    step = int(text)
    try:
        table = run.tables.table(step)
    except NotThere as error:
        raise ViewError(str(error)) from error
    groups = [number for number, about in enumerate(table.summaries) if about["query"] == query]
    if not groups:
        known = ", ".join(dict.fromkeys(one_line(about["query"], 24) for about in table.summaries[:8]))
        raise ViewError(
            f"step {step} has no group of query {visible(query)}; it has {known}, … ({len(table.summaries)})"
        )
    return "\n\n".join(_group_text(run, step, number, table.summaries[number]) for number in groups)


def _group_text(run: ViewedRun, step: int, number: int, about: dict[str, Any]) -> str:
    rows = run.tables.rows(step, number)
    lines = [
        f"{_bold(f'Step {step}, group {number}')}  query {visible(about['query'])}, {about['context']} prompt"
        + (f" showing attempt #{about['shown']}" if about["shown"] is not None else ""),
        visible(rows[0]["prompt"] if rows else about["question"]),
        *([f"Reference answer: {visible(about['answer'])}"] if about.get("answer") else []),
        "",
    ]
    for i, outcome in enumerate(about["outcomes"]):
        verdict = "right" if outcome else "truncated" if about["truncated"][i] else "wrong"
        paid = "" if about["ranking"][i] is None else f", ranking {about['ranking'][i]:+.3f}"
        parts = _parts(rows[i].get("reward_parts") or {}) if rows else ""
        reason = f" ({visible(str(rows[i].get('verdict', '')))})" if rows and rows[i].get("verdict") else ""
        lines.append(
            f"{_bold(f'[{i}] {verdict}')}{reason}, {_origin(about, i)}: "
            f"reward {about['rewards'][i] or 0:.3f}{parts}{paid}, "
            f"advantage {about['advantages'][i] or 0:+.3f}, {about['lengths'][i]} tokens"
        )
        if rows:
            lines += [f"    {line}" for line in visible(str(rows[i].get("response", ""))).split("\n")]
    if not rows:
        lines.append(
            "Only this summary of the group was saved; run.rollouts_groups says how many groups keep their answers."
        )
    return "\n".join(lines)


SOURCES = {"critique": "a refinement of a failure of this step", "demonstration": "a demonstration from the data"}
"""Where answers come from that joined a group and are not replayed."""


def _origin(about: dict[str, Any], i: int) -> str:
    if i < about["fresh"]:
        return "fresh"
    origin = origin_of(about, i)
    if origin in SOURCES:
        return SOURCES[origin]
    if about["steps"][i] == 0:  # from buffer.successes_from: this run's steps count from 1
        return "replayed from an earlier run"
    return f"replayed from step {about['steps'][i]}, age {about['versions'][0] - about['versions'][i]}"


def _parts(reward_parts: dict[str, Any]) -> str:
    """The parts of a reward, without the ranking reward, which is shown separately."""
    named = [f"{visible(name)} {value:.3f}" for name, value in reward_parts.items() if name != "ranking"]
    return f" ({' + '.join(named)})" if named else ""


def _metric_row(run: ViewedRun, label: str, key: str) -> tuple[str, str, str, str] | None:
    column = [value for value in run.metrics.columns.get(key, []) if value is not None]
    if not column:
        return None
    curve = sparkline(_resampled(column, _room()), _levels())
    return label, _number(column[0]), curve, _number(column[-1])


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else format_value(value)


def _resampled(values: Sequence[float], most: int) -> list[float]:
    """At most `most` values: means over equal stretches if there are more."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _saved_line(run: ViewedRun, path: Path) -> list[str]:
    steps = run.tables.steps()
    if not steps:
        return ["No rollouts were saved (run.rollouts_every)."]
    group = shlex.quote(visible(f"{steps[-1]}/{_some_query(run) or 'QUERY'}"))
    return [
        f"{len(steps)} steps with saved rollouts, {steps[0]} to {steps[-1]}. One group of one of them:",
        f"  r3 show {shlex.quote(str(path))} --group {group}",
    ]


def _some_query(run: ViewedRun) -> str | None:
    steps = run.tables.steps()
    try:
        return str(run.tables.table(steps[-1]).summaries[0]["query"]) if steps else None
    except (NotThere, IndexError, RuntimeError):  # a damaged last file: go without an example
        return None


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [text.rjust(widths[i]) if i in right else text.ljust(widths[i]) for i, text in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return [_bold(lines[0]), *lines[1:]]


def _room() -> int:
    return min(60, max(10, shutil.get_terminal_size((100, 24)).columns - 52))


def _levels() -> str:
    return _BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else _ASCII


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


# C0 and C1 controls except tab and newline; marks that change the direction of text; invisible line separators.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_PICTURES = 0x2400
"""Unicode has a picture of every C0 control, in order."""


def visible(text: str) -> str:
    r"""The same text with controls shown as characters.

    >>> visible("a\x1b[2Jb\u202ec")
    'a␛[2Jb⟨U+202E⟩c'
    """
    return _STEERING.sub(_picture, text)


def one_line(text: str, most: int) -> str:
    r"""The text on one line of at most `most` characters, the middle left out where it is longer.

    >>> one_line("first\nsecond", 40), one_line("abcdefghij", 7)
    ('first⏎second', 'abc…hij')
    """
    flat = visible(text[: 2 * most] if len(text) <= 2 * most else text[:most] + text[-most:]).replace("\n", "⏎")
    flat = flat.replace("\t", " ")
    if len(text) <= most and len(flat) <= most:
        return flat
    head = most // 2
    return f"{flat[:head]}…{flat[len(flat) - (most - head - 1) :]}"


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"
