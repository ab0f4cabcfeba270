"""The `r3` command. Every subcommand imports what it needs when it runs, so that `r3 --help` answers at once.

Exit codes: 0 done · 1 failed while running · 2 bad input, nothing was started · 3 training diverged ·
130 stopped by Ctrl-C, 143 by SIGTERM, both after a checkpoint, to be resumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from r3 import __version__

FAILED, BAD_INPUT, DIVERGED = 1, 2, 3
SIGNALS = {"SIGINT": 130, "SIGTERM": 143}

EPILOG = """\
examples:
  r3 train                                    the embedded model on the embedded task, no network, no GPU
  r3 train method=grpo train.steps=20         the same with plain GRPO, for 20 steps
  r3 train recipes/deepscaler-1.5b.yaml       the paper's setting
  r3 train --resume runs/r3-arithmetic-0      go on with a stopped run
  r3 view runs/r3-arithmetic-0                look at it in a browser, also while it runs
  r3 compare RECIPE --seeds 3 --tokens 1000000    GRPO, DAPO, R³ and its ablations on equal generated tokens

exit codes:
  0 done, 1 failed while running, 2 bad input, 3 diverged, 130 or 143 stopped by a signal after a checkpoint
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = _parsed(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("r3: stopped at once; what was not checkpointed is lost", file=sys.stderr)
        return SIGNALS["SIGINT"]
    except BrokenPipeError:  # `r3 … | head`
        sys.stderr.close()
        return FAILED
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return _explain(error)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere, also behind options, where argparse does not look for them."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if any(text.startswith("-") or not hasattr(arguments, "overrides") for text in rest):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _explain(error: Exception) -> int:
    """One of our own errors as its message, without a traceback; anything else is a bug and keeps its traceback."""
    from r3.buffer import SampleBufferError
    from r3.run import RunError

    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"ConfigError", "TaskError", "VerifierError", "ViewError"}:
        code = BAD_INPUT
    elif names & {"Diverged", "FloatingPointError"}:
        code = DIVERGED
    elif isinstance(error, SampleBufferError | RunError):
        code = FAILED
    else:
        raise error
    print(*(f"r3: {line}" for line in str(error).split("\n")), sep="\n", file=sys.stderr)
    return code


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
    _add_train(commands)
    _add_sft(commands)
    _add_eval(commands)
    _add_compare(commands)
    _add_models(commands)
    _add_verify(commands)
    _add_data(commands)
    _add_buffer(commands)
    _add_view(commands)
    return top


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a policy with R³, GRPO or DAPO",
        description="Train a policy. Without a recipe: the embedded model on the embedded task.",
        epilog="r3 train --print-config lists every setting with its meaning.",
    )
    train.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="a recipe; without one, the embedded default")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's, e.g. method=grpo")
    train.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with the run in this directory")
    train.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and stop")
    train.add_argument("--dry-run", action="store_true", help="build all but the weights, print the arithmetic, stop")
    train.add_argument("--processes", type=int, metavar="N", help="with --dry-run: as one of so many")
    train.add_argument("--quiet", action="store_true", help="no table at the end")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from r3.config import ConfigError, load_config
    from r3.config_text import describe

    recipe, overrides = arguments.recipe, list(arguments.overrides)
    if recipe is not None and "=" in recipe:  # no recipe, overrides only
        recipe, overrides = None, [recipe, *overrides]
    given = load_config(Path(recipe) if recipe else None, overrides)
    if arguments.resume is not None:
        from r3.train.resume import resumed_config

        if recipe is None and overrides:
            config = resumed_config(arguments.resume, overrides=overrides)
        else:
            config = resumed_config(arguments.resume, given=given if recipe else None)
    else:
        config = given
    if arguments.print_config:
        print(describe(config))
        return 0
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
    return _run_training(config, arguments)


def _run_training(config: object, arguments: argparse.Namespace) -> int:
    import logging

    logging.basicConfig(level=logging.WARNING, format="r3: %(message)s")
    from r3.train.report import print_report
    from r3.train.session import train

    finished = train(config, arguments.resume)  # type: ignore[arg-type]  # r3.config is imported late
    if finished is None:  # not the process that leads
        return 0
    if not arguments.quiet and finished.stopped_by is None:
        print_report(finished.directory)
    return 0 if finished.stopped_by is None else SIGNALS[finished.stopped_by]


def _add_sft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sft = commands.add_parser(
        "sft",
        help="a supervised warm start on written solutions, before r3 train",
        description="Train on a task's written solutions and write a Hugging Face folder that model.path takes.",
    )
    sft.add_argument("recipe", metavar="RECIPE.yaml", help="a recipe, as for r3 train; its method is not used")
    sft.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's")
    sft.set_defaults(run=_sft)


def _sft(arguments: argparse.Namespace) -> int:
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
    print(f"{told}; held-out loss a token {before:.3f} → {after:.3f}")
    print(f"written: {done.model}; reinforce it with r3 train RECIPE model.path={done.model}")
    return 0


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from r3.commands.eval import add_arguments

    text = "pass@k of a model, or of saved responses, on benchmarks"
    add_arguments(commands.add_parser("eval", help=text, description=f"{text[0].upper()}{text[1:]}, with intervals."))


def _add_view(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from r3.commands.view import add_show_arguments, add_view_arguments

    text = "look at runs in a browser: curves, groups, samples, buffer"
    add_view_arguments(commands.add_parser("view", help=text, description=f"{text[0].upper()}{text[1:]}."))
    text = "look at a run in the terminal"
    add_show_arguments(commands.add_parser("show", help=text, description=f"{text[0].upper()}{text[1:]}."))


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from r3.commands.compare import add_arguments

    text = "methods against each other on equal budgets of generated tokens"
    add_arguments(commands.add_parser("compare", help=text, description=f"{text[0].upper()}{text[1:]}, with a report."))


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from r3.commands.models import add_arguments

    add_arguments(commands.add_parser("models", help="models without a model hub: list, fetch, make"))


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "judge maths answers: JSON lines in, JSON lines out"
    verify = commands.add_parser(
        "verify",
        help=text,
        description='{"id", "prediction", "gold"} a line in; {"id", "correct", "reason", "seconds"} a line out.',
    )
    verify.add_argument("cases", metavar="CASES.jsonl", help="the cases, or - for standard input")
    verify.add_argument("--bare", action="store_true", help="take predictions without a \\boxed{} for bare answers")
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from r3.verify.command import run

    run(arguments.cases, bare=arguments.bare)
    return 0


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = commands.add_parser("data", help="check training data for evaluation problems; write it for verl")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
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


def _add_buffer(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    buffer = commands.add_parser("buffer", help="look at, check or copy a sample buffer")
    actions = buffer.add_subparsers(title="actions", metavar="ACTION", required=True)
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
        action.set_defaults(run=_buffer, action=name)


def _buffer(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
