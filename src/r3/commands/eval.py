"""`r3 eval`: a model, or saved responses of any model, on named benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3.commands.eval_tasks import (
    ALL_TASKS,
    JUDGES,
    OWN_TASK,
    PAPER_TASKS,
    TrainedRun,
    benchmarks_of,
    grader,
    open_run,
    prompting_of,
)

if TYPE_CHECKING:
    from r3.evaluate.results import Results
    from r3.evaluate.run import Benchmark, Progress
    from r3.policy.model import Policy
    from r3.samples import Query

EPILOG = f"""\
sets: {", ".join(ALL_TASKS[:12])},
      {", ".join(ALL_TASKS[12:])}

examples:
  r3 eval embedded --tasks arithmetic --samples 4 --max-tokens 44      in seconds, no network, no GPU
  r3 eval MODEL                                                        the paper's five benchmarks, 16 samples
  r3 eval runs/r3-arithmetic-0                                         what a run trained, on its own held-out problems
  r3 eval runs/mine --step 40 --tasks task,gsm8k-test                  an earlier checkpoint, there and on a set
  r3 eval MODEL --hard-subset-from evals/base --samples 256 --k 1,2,4,8,16,32,64,128,256 --out evals/hard
  r3 eval MODEL --max-tokens 4096,8192,16384,32768                     drawn once at the longest limit
  r3 eval --responses FILE.jsonl --tasks aime24                        judge what any model answered
  r3 eval MODEL --tasks mbpp,humaneval --samples 10 --max-tokens 1024  code, judged by running it in a sandbox

Started again with the same settings, an evaluation that was stopped goes on. The benchmarks are files: set R3_DATA to
the folder that holds them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 eval`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a local folder, a hub id, 'embedded', or the directory of a run")
    add("--step", type=int, metavar="N", help="of a run: the checkpoint of that step (the newest)")
    add("--tasks", type=_names, metavar="A,B", help=f"sets or files; 'task' is a run's own ({PAPER_TASKS})")
    add("--data", type=Path, metavar="DIR", help="folder of the sets (the environment variable R3_DATA)")
    add("--samples", type=_positive, default=16, metavar="N", help="answers to each problem (16)")
    add("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (0.6)")
    add("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (0.95)")
    add("--top-k", type=int, default=0, metavar="K", help="only the likeliest K tokens; 0 for all (0)")
    add(
        "--max-tokens",
        type=_numbers,
        default=None,
        metavar="L",
        help="longest response; several give a curve (32768, or the run's)",
    )
    add("--k", type=_numbers, default=(), metavar="1,2,4", help="pass@k for these k; several give a curve (1,N)")
    add("--limit", type=_positive, metavar="N", help="only the first N problems of each set")
    add("--hard-subset-from", type=Path, metavar="DIR", help="only problems that the evaluation in DIR hardly solved")
    add("--hard-at-most", type=int, default=1, metavar="C", help="right answers there, at most (1)")
    add("--responses", type=Path, metavar="FILE", help="judge these saved responses instead of drawing new ones")
    add("--judge", type=_judge_name, metavar="J", help="of files: math, boxed, code or package.module.function (math)")
    add("--question-column", metavar="C", help="of files: the question's column (problem)")
    add("--answer-column", metavar="C", help="of files: the reference answer's column (answer)")
    add("--system", metavar="TEXT", help="system prompt (none, or the run's)")
    add("--template", metavar="TEXT", help="made of a question: text with {question} and {any column}")
    add("--sandbox", choices=("auto", "namespaces", "landlock", "none"), default="auto", help="around code (auto)")
    add("--out", type=Path, metavar="DIR", help="where results and responses go (evals/MODEL, evals/RUN/step-N)")
    add("--parquet", action="store_true", help="also write the responses as Parquet")
    add("--name", help="the model's name in the table")
    add("--seed", type=int, default=0, metavar="S", help="of the answers and of the intervals (0)")
    add("--plain", action="store_true", help="plain prompts (the default where the tokenizer has no chat template)")
    add("--engine", default="auto", help="rollout engine (auto)")
    add("--max-rows", type=_positive, default=256, metavar="N", help="most responses drawn side by side (256)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    from r3.errors import TaskError
    from r3.evaluate.curves import require_matplotlib

    if arguments.model is None and arguments.responses is None:
        raise TaskError("r3 eval needs a MODEL to draw answers from, or --responses FILE to judge")
    if arguments.responses is None and arguments.k and max(arguments.k) > arguments.samples:
        raise TaskError(f"--k {max(arguments.k)} needs as many answers per problem: raise --samples to that")
    trained = open_run(arguments) if arguments.responses is None else None
    _fill_in(arguments, trained)
    if _curves_wanted(arguments):
        require_matplotlib()
    out = arguments.out or Path("evals") / (
        _label(arguments).replace("/", "-") if trained is None else f"{trained.name}/step-{trained.step:06d}"
    )
    with ExitStack() as stack:
        results = (
            _scored(arguments, out, stack)
            if arguments.responses is not None
            else _drawn(arguments, out, stack, trained)
        )
    _write_more(arguments, results, out)
    if trained is not None and arguments.out is None:
        _write_side_by_side(out.parent)
    return 0


def _fill_in(arguments: argparse.Namespace, trained: TrainedRun | None) -> None:
    """What was not given, as it is for a model or for a run."""
    from r3.errors import ConfigError

    if arguments.tasks is None:
        arguments.tasks = _names(PAPER_TASKS) if trained is None else (OWN_TASK,)
    if trained is None and OWN_TASK in arguments.tasks:
        raise ConfigError("--tasks task is a run's own task: give the directory of a run as MODEL")
    if trained is not None:
        arguments.max_tokens = arguments.max_tokens or (trained.config.evaluation_limit,)
        arguments.name = arguments.name or trained.label


def _write_side_by_side(folder: Path) -> None:
    """The results of all of a run's checkpoints as one table, in the order of their steps."""
    from r3.evaluate.results import paper_table
    from r3.run.disk import write_atomically

    results = [json.loads(path.read_bytes()) for path in sorted(folder.glob("step-*/results.json"))]
    table = paper_table(results)
    write_atomically(folder / "results.md", f"{table}\n".encode())
    if len(results) > 1:
        print(f"\n{table}\n\nside by side: {folder / 'results.md'}")


def _drawn(arguments: argparse.Namespace, out: Path, stack: ExitStack, trained: TrainedRun | None) -> Results:
    """Answers from a model."""
    from r3.config import validate
    from r3.errors import ConfigError
    from r3.policy.source import check_model, digest_of_weights

    path = arguments.model if trained is None else str(trained.policy)
    model = {"path": path, "device": arguments.device, "dtype": arguments.dtype}
    config = validate({"model": model, "rollout": {"engine": arguments.engine, "max_rows": arguments.max_rows}})
    check_model(config.model)  # before torch is imported for nothing
    from r3.evaluate.run import evaluate_model
    from r3.method.reflection import plain_prompt
    from r3.policy.model import Policy, resolve
    from r3.rollout import Sampling
    from r3.train.build import make_engine

    policy = Policy.load(config.model)
    prompting = prompting_of(arguments, policy.tokenizer, trained)
    benchmarks = benchmarks_of(arguments, prompting, stack, trained)
    try:
        sampling = Sampling(
            max_tokens=max(_limits(arguments)),
            stop_tokens=policy.stop_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
        )
    except ValueError as error:
        raise ConfigError(f"r3 eval: {error}") from error

    def encode(query: Query) -> Any:
        return plain_prompt(query, policy.tokenizer)

    _check_context(policy, benchmarks, encode, sampling.max_tokens)
    return evaluate_model(
        make_engine(config, policy),
        policy.tokenizer,
        benchmarks,
        sampling,
        arguments.samples,
        out,
        encode=encode,
        model=_label(arguments),
        about={
            "model": path,
            "weights": digest_of_weights(resolve(path)),
            "grader": grader(arguments, trained),
            "chat": prompting.chat,
            **_asked_otherwise(arguments),
        },
        notes=_notes(arguments),
        ks=arguments.k,
        seed=arguments.seed,
        progress=_progress(),
    )


def _scored(arguments: argparse.Namespace, out: Path, stack: ExitStack) -> Results:
    """Answers from a file."""
    from r3.evaluate.responses import SavedResponses
    from r3.evaluate.run import score_responses

    benchmarks = benchmarks_of(arguments, prompting_of(arguments, None, None), stack)
    tasks = {benchmark.name: benchmark.queries for benchmark in benchmarks}
    saved = SavedResponses(arguments.responses, tasks, count_tokens=_token_counter(arguments.model))
    about = {"responses": str(arguments.responses), "grader": grader(arguments, None)}
    results = score_responses(
        saved,
        benchmarks,
        out,
        model=_label(arguments),
        about=about,
        notes=_notes(arguments),
        ks=arguments.k,
        seed=arguments.seed,
        progress=_progress(),
    )
    if saved.ignored:
        print(f"r3: {saved.ignored} rows of {arguments.responses} answer problems of other sets", file=sys.stderr)
    return results


def _write_more(arguments: argparse.Namespace, results: Results, out: Path) -> None:
    """The curves that were asked for, Parquet, and the tables on screen."""
    from r3.evaluate.curves import curve_over_k, curve_over_limits, write_curves
    from r3.evaluate.responses import write_parquet
    from r3.evaluate.results import details, paper_table

    print(f"{paper_table([results.as_dict()])}\n\n{details(results)}\n")
    if _curves_wanted(arguments):
        answers = {results.tasks[name].title: problems for name, problems in results.answers.items()}
        curves = [curve_over_k(answers, arguments.k, seed=arguments.seed)] if len(arguments.k) > 1 else []
        if len(_limits(arguments)) > 1:
            fewest = min(task.samples for task in results.tasks.values())
            limits, k = _limits(arguments), min(16, fewest)  # the paper's curve is of pass@16
            curves.append(curve_over_limits(answers, limits, k=k, seed=arguments.seed))
        print("curves:", *write_curves(curves, out))
    if arguments.parquet:
        write_parquet(out / "responses.jsonl", out / "responses.parquet")
    print(f"results: {out / 'results.md'}, {out / 'results.json'}; every response: {out / 'responses.jsonl'}")


def _asked_otherwise(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the prompts, if anything: answers drawn without it are others."""
    given = {name: getattr(arguments, name) for name in ("system", "template", "question_column", "answer_column")}
    return {name: value for name, value in given.items() if value is not None}


def _notes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which problems were chosen, for whoever reads the results."""
    source = arguments.hard_subset_from
    hard = None if source is None else f"right at most {arguments.hard_at_most} times in {source}"
    return {"problems": hard, "first": arguments.limit}


def _check_context(
    policy: Policy, benchmarks: Sequence[Benchmark], encode: Callable[[Query], Any], max_tokens: int
) -> None:
    from r3.errors import ConfigError

    if not policy.stop_tokens:
        raise ConfigError(
            "the model's tokenizer names no end-of-text token, so no answer could ever end; set eos_token"
        )
    longest = max(len(encode(query)) for mark in benchmarks for query in mark.queries)
    room = policy.max_context
    if room is not None and longest + max_tokens > room:
        raise ConfigError(
            f"--max-tokens {max_tokens} and a prompt of {longest} tokens exceed the model's context of {room}; set "
            f"--max-tokens to at most {max(0, room - longest)}"
        )


def _token_counter(model: str | None) -> Callable[[str], int] | None:
    """Counts with the tokenizer of the model that is named, if one is."""
    if model is None:
        return None
    from r3.policy import ModelSettings
    from r3.policy.model import load_tokenizer, resolve

    tokenizer = load_tokenizer(resolve(model), ModelSettings(path=model))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _progress() -> Progress:
    """A counter on standard error: in place on a terminal, else a line for every tenth."""
    shown = -1

    def tell(done: int, total: int | None) -> None:
        nonlocal shown
        of = "" if total is None else f" of {total:,}"
        if sys.stderr.isatty():
            print(f"\rr3: {done:,}{of} answers", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif total and done * 10 // total > shown:
            shown = done * 10 // total
            print(f"r3: {done:,}{of} answers", file=sys.stderr, flush=True)

    return tell


def _curves_wanted(arguments: argparse.Namespace) -> bool:
    return len(arguments.k) > 1 or len(_limits(arguments)) > 1


def _limits(arguments: argparse.Namespace) -> tuple[int, ...]:
    return arguments.max_tokens or (32_768,)


def _label(arguments: argparse.Namespace) -> str:
    source = arguments.model or arguments.responses.stem
    return str(arguments.name or str(source).rstrip("/").rpartition("/")[2])


def _judge_name(text: str) -> str:
    if text not in JUDGES and "." not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(JUDGES)}, nor package.module.function")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in (part.strip() for part in text.split(",")) if name))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
