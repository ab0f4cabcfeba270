"""`r3 show`: look at a run in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  r3 show runs/r3-arithmetic-0                         a summary with small curves
  r3 show runs/r3-arithmetic-0 --group 12/ABC          the groups of query ABC at step 12, every answer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 show`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run")
    parser.add_argument("--group", metavar="STEP/QUERY", help="show every answer of a query's groups at a step")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print to standard output; returns the exit code."""
    from r3.view.show import show_group, show_run

    print(show_group(arguments.run_dir, arguments.group) if arguments.group else show_run(arguments.run_dir))
    return 0
