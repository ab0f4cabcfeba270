"""`r3 buffer`: look at, check or copy a sample buffer."""

from __future__ import annotations

import argparse

from r3.errors import FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `r3 buffer`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text in (
        ("stats", "what is in it"),
        ("check", "look for damage"),
        ("export", "write it to a .jsonl, .jsonl.gz or .parquet file"),
        ("import", "fill a new buffer from an exported file"),
        ("salvage", "copy what is readable of a damaged buffer into a new one"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("file", help="the buffer file, e.g. runs/…/buffer.sqlite")
        if name in ("export", "import", "salvage"):
            action.add_argument(
                "other", help={"export": "where to", "import": "from where", "salvage": "new file"}[name]
            )
        action.set_defaults(run=run, action=name)


def run(arguments: argparse.Namespace) -> int:
    """Look at, check or copy a buffer; returns the exit code."""
    from dataclasses import asdict

    from r3.buffer import SampleBuffer, salvage

    if arguments.action == "import":
        with SampleBuffer(arguments.file, per_query=None, total=None) as buffer:
            print(f"{arguments.file}: {buffer.import_(arguments.other)} samples imported")
        return 0
    if arguments.action == "salvage":
        print(salvage(arguments.file, arguments.other))
        return 0
    with SampleBuffer.open_reader(arguments.file) as buffer:
        if arguments.action == "export":
            print(f"{arguments.other}: {buffer.export(arguments.other)} samples written")
        elif arguments.action == "check":
            problems = buffer.check()
            print("\n".join(problems) or f"{arguments.file}: no damage found")
            return FAILED if problems else 0
        else:
            print("\n".join(f"{name.replace('_', ' '):>22}  {value}" for name, value in asdict(buffer.stats()).items()))
    return 0
