"""`r3 train`: train a policy with R³, GRPO, DAPO or another method."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3.errors import SIGNALS

if TYPE_CHECKING:
    from r3.config import Config

TITLES = {"grpo": "GRPO", "r3": "R³"}


def add_arguments(train: argparse.ArgumentParser) -> None:
    """The options of `r3 train`."""
    train.epilog = "r3 train --print-config lists every setting with its meaning."
    train.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="a recipe; without one, the embedded default")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's, e.g. method=grpo")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with the run in this directory")
    train.add_argument(
        "--allow-changed-data", action="store_true", help="with --resume: go on though data set or tokenizer changed"
    )
    train.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and stop")
    train.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors, and stop")
    train.add_argument("--changed", action="store_true", help="with --print-config: only what differs from defaults")
    train.add_argument("--dry-run", action="store_true", help="build all but the weights, print the arithmetic, stop")
    train.add_argument("--processes", type=int, metavar="N", help="with --dry-run: as one of N processes")
    train.add_argument("--quiet", action="store_true", help="no table at the end")
    train.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, or only look at what would be trained; returns the exit code."""
    import logging

    from r3.config import changes, load_config, tell_without_effect
    from r3.config_text import describe
    from r3.errors import ConfigError

    if arguments.schema:
        return _print_schema()
    recipe, overrides = arguments.recipe, list(arguments.overrides)
    if recipe is not None and "=" in recipe:  # no recipe, overrides only
        recipe, overrides = None, [recipe, *overrides]
    if arguments.resume is None:
        config = load_config(Path(recipe) if recipe else None, overrides)
    else:
        from r3.train.resume import resumed_config

        if recipe is None:  # overrides are of the run's own settings, and need not go with the defaults
            config = resumed_config(arguments.resume, overrides=overrides)
        else:
            config = resumed_config(arguments.resume, given=load_config(Path(recipe), overrides))
    if arguments.changed and not arguments.print_config:
        raise ConfigError("--changed is for --print-config: r3 train … --print-config --changed")
    if arguments.allow_changed_data and arguments.resume is None:
        raise ConfigError("--allow-changed-data is for --resume: a new run takes the data as it is")
    if arguments.print_config:
        print(changes(config) if arguments.changed else describe(config))
        return 0
    logging.basicConfig(level=logging.WARNING, format="r3: %(message)s")
    tell_without_effect(config, overrides)
    processes = arguments.processes
    if processes is not None and (processes < 1 or not arguments.dry_run):
        raise ConfigError(
            f"--processes {processes} is for the sums of --dry-run, from 1 on; to train in several processes: "
            "torchrun --nproc-per-node N -m r3 train …"
        )
    if arguments.dry_run:
        if arguments.resume is not None:
            raise ConfigError("--dry-run looks at a recipe, --resume at a run: give one of them")
        from r3.train.dryrun import dry_run

        print(dry_run(config, processes=processes or 1))
        return 0
    if arguments.resume is None:
        from r3.policy.source import check_model

        check_model(config.model)
    else:  # what the run was begun with is in its own config
        recipe, overrides = str(arguments.resume / "config.yaml"), []
    return _run_training(config, arguments, recipe, overrides)


def _print_schema() -> int:
    import json

    from r3.config import Config
    from r3.config_text import schema

    print(json.dumps(schema(Config), indent=1, ensure_ascii=False))
    return 0


def _run_training(config: Config, arguments: argparse.Namespace, recipe: str | None, overrides: list[str]) -> int:
    import contextlib

    from r3.train.session import train

    finished = train(config, arguments.resume, allow_changed_data=arguments.allow_changed_data)
    if finished is None:  # not the process that leads
        return 0
    if not arguments.quiet and finished.stopped_by is None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the run is finished all the same
            print_report(finished.directory, config, recipe, overrides)
    return 0 if finished.stopped_by is None else SIGNALS[finished.stopped_by]


def print_report(directory: Path, config: Config, recipe: str | None, overrides: Sequence[str]) -> None:
    """Print the summary of a finished run to standard output: accuracy, what each mechanism did, and what to do next.

    `recipe` and `overrides` are what it was begun with.
    """
    from r3.run import RunFiles, read_metrics

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
    from r3.evaluate.passk import Accuracy

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
    from r3.run import RunFiles

    steps = RunFiles(directory).checkpoints.steps()
    return f"{directory}/checkpoints/step-{steps[-1]:06d}/policy" if steps else "none"
