"""The summary at the end of a run: accuracy, what each mechanism did, and what to do next."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r3.config import Config
from r3.evaluate.passk import Accuracy
from r3.run import read_metrics
from r3.run.directory import RunFiles

TITLES = {"grpo": "GRPO", "r3": "R³"}


def print_report(directory: Path, config: Config, recipe: str | None, overrides: Sequence[str]) -> None:
    """Print the summary of a finished run to standard output; `recipe` and `overrides` are what it was begun with."""
    lines = list(read_metrics(RunFiles(directory).metrics_path))
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for title, rows in summary(lines).items():
        print(f"\n{bold}{title}{plain}")
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            print(f"  {label:<{width}}  {value}")
    print(f"\n{bold}Run directory{plain}  {directory}")
    print(f"{bold}Next{plain}")
    print(f"  the trained policy       {_policy(directory)}")
    print(f"  curves, groups, answers  r3 view {directory}")
    other = "r3" if config.method.name == "grpo" else "grpo"
    print(f"  {f'the same with {TITLES[other]}':<23}  {with_method(other, directory, config, recipe, overrides)}")


def with_method(name: str, directory: Path, config: Config, recipe: str | None, overrides: Sequence[str]) -> str:
    """The run's own command with another method, in a directory of its own."""
    replaced = {"method", "method.name"}
    more = [f"method={name}"]  # last: it resets what it governs
    if "{method}" not in config.run.dir:
        replaced.add("run.dir")
        more.append(f"run.dir={directory}-{name}")
    kept = [setting for setting in overrides if setting.partition("=")[0].strip() not in replaced]
    return shlex.join(["r3", "train", *([] if recipe is None else [recipe]), *kept, *more])


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """The tables of a run's metrics, as titles with rows of label and text."""
    evaluated = [line for line in lines if "heldout/right" in line]
    steps = [line for line in lines if line["step"] > 0]
    tables: dict[str, list[tuple[str, str]]] = {}
    if evaluated:
        rows = [("before training", _accuracy(evaluated[0]))]
        if len(evaluated) > 1:
            rows.append((f"after step {evaluated[-1]['step']:.0f}", _accuracy(evaluated[-1])))
        tables["Held-out accuracy: right / problems, 95 % interval"] = rows
        if names := sorted({key for line in evaluated for key in line if key.startswith("heldout/reward/")}):
            means = [f"{_shown(evaluated[0], name)} → {_shown(evaluated[-1], name)}" for name in names]
            labels = [name.removeprefix("heldout/reward/") for name in names]
            tables["Held-out rewards by name: mean, before → after training"] = list(zip(labels, means, strict=True))
    if steps:
        tables["How often each mechanism acted"] = _mechanisms(steps)
        tables["Groups that teach nothing by themselves"] = [
            ("solve-none, first → last steps", _trend(steps, "solve_none")),
            ("solve-all, first → last steps", _trend(steps, "solve_all")),
            ("truncated answers, first → last steps", _trend(steps, "truncated")),
        ]
        tables["Work"] = [
            ("steps", f"{len(steps)}"),
            ("tokens generated", f"{_total(steps, 'tokens/generated'):,.0f}"),
            ("time", f"{_total(steps, 'seconds/step'):.0f} s in training steps"),
        ]
    return tables


def _mechanisms(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    replayed, joined = _total(steps, "replay/samples"), _total(steps, "replay/joined")
    reflected, solved = _total(steps, "groups/reflection"), _total(steps, "reflection/solved")
    ranked, in_groups = _total(steps, "ranking/samples"), _total(steps, "ranking/groups")
    crossed = _total(steps, "replay/cross_context")
    return [
        ("replay", f"{replayed:.0f} past answers joined {joined:.0f} groups ({crossed:.0f} first found in reflection)"),
        ("reflection", f"{reflected:.0f} groups with a past failure shown, {solved:.0f} of them with a right answer"),
        ("ranking", f"{ranked:.0f} truncated answers ranked in {in_groups:.0f} groups"),
        ("groups that taught", f"{_total(steps, 'groups/teaching'):.0f} of {_total(steps, 'groups'):.0f}"),
    ]


def _shown(line: Mapping[str, Any], key: str) -> str:
    return f"{line.get(key, 0.0):.3f}"


def _accuracy(line: Mapping[str, Any]) -> str:
    if line.get("heldout/samples", 1) > 1:  # several answers per problem: the interval is over problems
        return (
            "{heldout/right}/{heldout/total} = {heldout/accuracy:.1%} [{heldout/low:.1%}, {heldout/high:.1%}]".format(
                **line
            )
        )
    return str(Accuracy(int(line["heldout/right"]), int(line["heldout/total"])))


def _trend(steps: Sequence[Mapping[str, Any]], key: str) -> str:
    """Means over the first and the last tenth of the steps."""
    tenth = max(1, len(steps) // 10)
    first, last = (_mean([line.get(key, math.nan) for line in part]) for part in (steps[:tenth], steps[-tenth:]))
    return f"{first:.0%} → {last:.0%}"


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _total(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(line.get(key, 0.0) for line in steps))


def _policy(directory: Path) -> str:
    steps = RunFiles(directory).checkpoints.steps()
    return f"{directory}/checkpoints/step-{steps[-1]:06d}/policy" if steps else "none"
