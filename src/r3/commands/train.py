"""`r3 train`: train a policy with R³, GRPO, DAPO or another method."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from r3.errors import SIGNALS

if TYPE_CHECKING:
    from r3.config import Config


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
        from r3.policy.hub import check_model

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
    from r3.train.summary import print_report

    finished = train(config, arguments.resume, allow_changed_data=arguments.allow_changed_data)
    if finished is None:  # not the process that leads
        return 0
    if not arguments.quiet and finished.stopped_by is None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the run is finished all the same
            print_report(finished.directory, config, recipe, overrides)
    return 0 if finished.stopped_by is None else SIGNALS[finished.stopped_by]
