"""`r3 verify`: judge maths answers, JSON lines in, JSON lines out."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 verify`."""
    parser.description = (
        '{"id", "prediction", "gold"} per line in; {"id", "correct", "reason", "seconds"} per line out.'
    )
    parser.add_argument("cases", metavar="CASES.jsonl", help="the cases, or - for standard input")
    parser.add_argument("--bare", action="store_true", help="take predictions without a \\boxed{} for bare answers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Judge the cases; returns the exit code."""
    from r3.verify.command import run as judge

    judge(arguments.cases, bare=arguments.bare)
    return 0
