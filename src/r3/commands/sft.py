"""`r3 sft`: a supervised warm start on written solutions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r3.errors import SIGNALS


def add_arguments(sft: argparse.ArgumentParser) -> None:
    """The options of `r3 sft`."""
    sft.add_argument("recipe", metavar="RECIPE.yaml", help="a recipe, as for r3 train; its method is not used")
    sft.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's")
    sft.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train on written solutions; returns the exit code."""
    from r3.config import load_config

    config = load_config(Path(arguments.recipe), list(arguments.overrides))
    from r3.train.sft import warm_start

    done = warm_start(config)
    if done.stopped_by is not None:
        print(f"r3: stopped by {done.stopped_by}; nothing was kept, the same command starts again", file=sys.stderr)
        return SIGNALS[done.stopped_by]
    before, after = done.losses
    retries = f", {done.retries:,} of them after a failed attempt" if done.retries else ""
    told = f"{done.examples:,} solutions{retries} ({done.too_long:,} too long)"
    print(f"{told}; held-out loss per token {before:.3f} → {after:.3f}")
    print(f"written: {done.model}; reinforce it with r3 train RECIPE model.path={done.model}")
    return 0
