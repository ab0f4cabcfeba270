"""`r3 data`: check training data for evaluation problems; write it for verl."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `r3 data`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="find evaluation problems in training data", description="exit code 1: found"
    )
    check.add_argument("file", help="a training file, or the name of a set (deepscaler, math, gsm8k)")
    check.add_argument("--against", metavar="A,B", help="evaluation sets or files; without it, every known set")
    check.add_argument("--data", type=Path, metavar="DIR", help="folder of the sets (the environment variable R3_DATA)")
    check.set_defaults(run=_data_check)
    text = "write a recipe's task as Parquet files for verl (docs/verl.md)"
    verl = actions.add_parser("verl", help=text, description=text)
    verl.add_argument("recipe", metavar="RECIPE.yaml", help="a recipe, as for r3 train; its task is written")
    verl.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's, e.g. task.path=…")
    verl.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for train.parquet, heldout.parquet")
    verl.set_defaults(run=_data_verl)


def _data_verl(arguments: argparse.Namespace) -> int:
    from r3.config import load_config
    from r3.integrations.verl.data import export

    print("\n".join(export(load_config(Path(arguments.recipe), list(arguments.overrides)), arguments.to)))
    return 0


def _data_check(arguments: argparse.Namespace) -> int:
    from r3.tasks.leakage import check

    against = [name for name in (arguments.against or "").split(",") if name]
    return check(arguments.file, against, folder=arguments.data)
