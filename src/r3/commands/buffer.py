"""`r3 buffer`: look at, check or copy a sample buffer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from r3.errors import FAILED

if TYPE_CHECKING:
    from r3.buffer import Salvaged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `r3 buffer`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    buffer = ("BUFFER", "a run directory, or its buffer.sqlite")
    for name, text, first, second in (
        ("stats", "what is in it", buffer, None),
        ("check", "look for damage", buffer, None),
        ("export", "write it to a file", buffer, ("FILE", "a new .jsonl, .jsonl.gz or .parquet file")),
        (
            "import",
            "fill a new buffer from an exported file",
            ("FILE", "what export wrote"),
            ("NEW", "its path"),
        ),
        ("salvage", "copy what is readable of a damaged buffer into a new one", buffer, ("NEW", "its path")),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("source", type=Path, metavar=first[0], help=first[1])
        if second is not None:
            action.add_argument("target", type=Path, metavar=second[0], help=second[1])
        action.set_defaults(run=run, action=name)


def run(arguments: argparse.Namespace) -> int:
    """Look at, check or copy a buffer; returns the exit code."""
    from dataclasses import asdict

    from r3.buffer import SampleBuffer, salvage

    if arguments.action == "import":
        return _import(arguments.source, arguments.target)
    source: Path = arguments.source / "buffer.sqlite" if arguments.source.is_dir() else arguments.source
    if arguments.action == "salvage":
        print("\n".join(_told(salvage(source, arguments.target), arguments.target)))
        return 0
    with SampleBuffer.open_reader(source) as buffer:
        if arguments.action == "export":
            print(f"{arguments.target}: {buffer.export(arguments.target)} samples written")
        elif arguments.action == "check":
            problems = buffer.check()
            print("\n".join(problems) or f"{source}: no damage found")
            return FAILED if problems else 0
        else:
            print("\n".join(f"{name.replace('_', ' '):>22}  {value}" for name, value in asdict(buffer.stats()).items()))
    return 0


def _import(source: Path, target: Path) -> int:
    from r3.buffer import SampleBuffer
    from r3.errors import ConfigError

    if not source.is_file():
        raise ConfigError(f"{source}: no such file; r3 buffer import FILE NEW reads what r3 buffer export wrote")
    if target.exists():
        raise ConfigError(f"{target} is there already; an import fills a new buffer: give another path")
    with SampleBuffer(target, per_query=None, total=None) as buffer:
        print(f"{target}: {buffer.import_(source)} samples imported")
    return 0


def _told(salvaged: Salvaged, target: Path) -> list[str]:
    lost = "how many are lost is not known" if salvaged.missing is None else f"{salvaged.missing} lost"
    lines = [f"{target}: {salvaged.samples} samples copied, {len(salvaged.unreadable)} unreadable, {lost}"]
    if salvaged.unreadable:
        lines.append(f"unreadable ids: {', '.join(map(str, salvaged.unreadable))}")
    if not salvaged.ledger_kept:
        lines.append("the ledger of attempts was damaged and is rebuilt from what was copied: older attempts are lost")
    return lines
