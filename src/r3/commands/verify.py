r"""`r3 verify CASES.jsonl`: one case per line in, one verdict per line out, in order, as they come.

In: {"id", "prediction", "gold"}, and optionally "kind": "answer" marks a prediction that is a bare final answer, which
is then judged as if it stood in \boxed{}; any other kind, or none, is a whole model output.
Out: {"id", "correct", "reason", "seconds"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from r3.verify.maths import MathSettings


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
    judge_cases(arguments.cases, bare=arguments.bare)
    return 0


_BATCH = 256


def judge_cases(
    path: str,
    out: TextIO | None = None,
    *,
    bare: bool = False,
    settings: MathSettings | None = None,
    batch: int = _BATCH,
) -> dict[str, int]:
    """Judge the cases of a file, or of standard input for "-"; returns how often each reason occurred.

    `bare` takes every prediction without a box for a bare answer.
    """
    from r3.verify.judge import Case
    from r3.verify.maths import MathVerifier

    out = out or sys.stdout
    source = nullcontext(sys.stdin) if path == "-" else _opened(path)
    with source as lines, MathVerifier(settings) as verifier:
        rows = _rows(path, lines)
        while chunk := list(islice(rows, batch)):
            cases = [Case(_completion(row, bare), row["gold"], bool(row.get("truncated"))) for row in chunk]
            for row, verdict in zip(chunk, verifier.verify_many(cases), strict=True):
                line = {
                    "id": row["id"],
                    "correct": verdict.right,
                    "reason": verdict.reason,
                    "seconds": round(verdict.seconds, 6),
                }
                out.write(json.dumps(line) + "\n")
            out.flush()
        return dict(verifier.counts())


def _opened(path: str) -> TextIO:
    from r3.verify.judge import VerifierError

    try:
        return Path(path).open(encoding="utf-8")
    except OSError as error:
        raise VerifierError(
            f"cannot read {path} ({error.strerror}); give a JSONL file, or - for standard input"
        ) from error


def _rows(path: str, lines: TextIO) -> Iterator[dict[str, Any]]:
    from r3.verify.judge import VerifierError

    for number, line in enumerate(_decoded(path, lines), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"{path}, line {number}: not JSON ({error}); every line is one object") from error
        if not isinstance(row, dict) or not {"id", "prediction", "gold"} <= row.keys():
            raise VerifierError(f"{path}, line {number}: a case needs the keys id, prediction and gold")
        yield {**row, "prediction": str(row["prediction"]), "gold": str(row["gold"])}


def _decoded(path: str, lines: TextIO) -> Iterator[str]:
    from r3.verify.judge import VerifierError

    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise VerifierError(
            f"{path}: not UTF-8 text ({error}); convert it, e.g. with iconv -f latin1 -t utf8"
        ) from error


def _completion(row: dict[str, Any], bare: bool) -> str:
    prediction: str = row["prediction"]
    wrap = row.get("kind") == "answer" or (bare and "\\boxed" not in prediction)
    return f"\\boxed{{{prediction}}}" if wrap else prediction
