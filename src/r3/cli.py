"""The `r3` command. Every subcommand imports what it needs when it runs, so that `r3 --help` answers at once.

Exit codes: 0 done · 1 failed while running · 2 bad input, nothing was started · 3 training diverged ·
130 stopped by Ctrl-C, 143 by SIGTERM, 129 by a closed terminal (SIGHUP), each after a checkpoint, to be resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module

from r3 import __version__
from r3.errors import DIVERGED, FAILED, SIGNALS, R3Error

COMMANDS = {
    "train": "train a policy with R³, GRPO, DAPO or another method",
    "recipes": "the recipes that come with r3: list them, copy one to run and change it",
    "methods": "the methods that there are, what each needs, where it comes from",
    "sft": "a supervised warm start on written solutions, before r3 train",
    "eval": "pass@k of a model, or of saved responses, on benchmarks",
    "probe": "before a long run: which mechanism will pay on this model and data",
    "compare": "methods against each other on equal budgets of generated tokens",
    "models": "models without a model hub: list, fetch, make",
    "verify": "judge maths answers: JSON lines in, JSON lines out",
    "data": "check training data for evaluation problems; write it for verl",
    "buffer": "look at, check or copy a sample buffer",
    "view": "look at runs in a browser: curves, groups, samples, buffer",
    "show": "look at a run in the terminal",
    "doctor": "what is installed and usable here, for bug reports",
    "completion": "completion for bash, zsh and fish",
}
"""Each is a module of r3.commands, which says what its options are and what it does."""

EPILOG = """\
examples:
  r3 train                                    the embedded model on the embedded task, no network, no GPU
  r3 train method=grpo train.steps=20         the same with plain GRPO, for 20 steps
  r3 train recipes/deepscaler-1.5b.yaml       the paper's setting
  r3 probe RECIPE                             before a long run: which mechanism will pay
  r3 train --resume runs/r3-arithmetic-0      go on with a stopped run
  r3 view runs/r3-arithmetic-0                look at it in a browser, also while it runs
  r3 compare RECIPE --seeds 3 --tokens 1000000    GRPO, DAPO, R³ and its ablations on equal generated tokens

exit codes:
  0 done, 1 failed while running, 2 bad input, 3 diverged, 130, 143 or 129 stopped by a signal after a checkpoint
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    # Closed at the start: Python has no stream then, and the next file opened would get its number.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal or file that knows only ASCII gets ? and escapes for the rest
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parsed(argv)
    try:
        code = int(arguments.run(arguments))
    except KeyboardInterrupt:
        _tell("stopped at once; what was not checkpointed is lost")
        code = SIGNALS["SIGINT"]
    except BrokenPipeError:  # `r3 … | head`
        code = FAILED
    except (R3Error, FloatingPointError) as error:
        code = _explained(error)
    except Exception as error:  # noqa: BLE001  # a bug: kept for whoever mends it, not poured over the screen
        code = _unexpected(error)
    _flush()
    return code


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere, also behind options, where argparse does not look for them."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if any(text.startswith("-") or not hasattr(arguments, "overrides") for text in rest):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _explained(error: R3Error | FloatingPointError) -> int:
    """The error's message without a traceback; returns the exit code."""
    for line in str(error).split("\n"):
        _tell(line)
    return error.exit_code if isinstance(error, R3Error) else DIVERGED


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"r3: {line}", file=sys.stderr)


def _unexpected(error: Exception) -> int:
    """One line on an error that nobody foresaw, its traceback in a file; returns the exit code."""
    told = " ".join(str(error).split())[:300]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="r3-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            traceback.print_exception(error, file=file)
        where = f"the traceback is in {file.name}"
    except OSError as refused:
        where = f"its traceback could not be written ({refused.strerror})"
    _tell(f"unexpected {type(error).__name__}: {told}; {where}, please report it")
    return FAILED


def _flush() -> None:
    """Hand over what was printed. Where nobody reads any more, Python's own attempt would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="r3",
        description="R³: Replay, Reflection and Ranking rewards for reinforcement learning of reasoning LLMs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"r3 {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        import_module(f"r3.commands.{name}").add_arguments(command)
    return top


if __name__ == "__main__":
    sys.exit(main())
