"""`r3 eval`: a model, or saved responses of any model, on named benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.evaluate.results import Results
    from r3.evaluate.run import Benchmark, Progress
    from r3.policy.model import Policy
    from r3.samples import Query
    from r3.tasks.prompting import Prompting
    from r3.verify import Judge

PAPER_TASKS = "aime24,math500,amc23,minerva,olympiadbench"
EMBEDDED_TASK = "arithmetic"

EPILOG = """\
examples:
  r3 eval embedded --tasks arithmetic --samples 4 --max-tokens 44      in seconds, no network, no GPU
  r3 eval MODEL                                                        the paper's five benchmarks, 16 samples
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
    add("model", nargs="?", metavar="MODEL", help="a local folder, a hub id, or 'embedded'")
    add("--tasks", type=_names, default=_names(PAPER_TASKS), metavar="A,B", help=f"sets or files ({PAPER_TASKS})")
    add("--data", type=Path, metavar="DIR", help="folder of the sets (the environment variable R3_DATA)")
    add("--samples", type=_positive, default=16, metavar="N", help="answers to each problem (16)")
    add("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (0.6)")
    add("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (0.95)")
    add("--top-k", type=int, default=0, metavar="K", help="only the likeliest K tokens; 0 for all (0)")
    add("--max-tokens", type=_numbers, default=None, metavar="L", help="longest response; several give a curve (32768)")
    add("--k", type=_numbers, default=(), metavar="1,2,4", help="pass@k for these k; several give a curve (1,N)")
    add("--limit", type=_positive, metavar="N", help="only the first N problems of each set")
    add("--hard-subset-from", type=Path, metavar="DIR", help="only problems that the evaluation in DIR hardly solved")
    add("--hard-at-most", type=int, default=1, metavar="C", help="right answers there, at most (1)")
    add("--responses", type=Path, metavar="FILE", help="judge these saved responses instead of drawing new ones")
    add("--judge", choices=("math", "boxed", "code"), default="math", help="of files: maths, equal boxes, tests (math)")
    add("--sandbox", choices=("auto", "namespaces", "landlock", "none"), default="auto", help="around code (auto)")
    add("--out", type=Path, metavar="DIR", help="where results and responses go (evals/MODEL)")
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
        raise TaskError(f"--k {max(arguments.k)} needs as many answers a problem: raise --samples to that")
    if _curves_wanted(arguments):
        require_matplotlib()
    out = arguments.out or Path("evals") / _label(arguments).replace("/", "-")
    with ExitStack() as stack:
        results = _scored(arguments, out, stack) if arguments.responses is not None else _drawn(arguments, out, stack)
    _write_more(arguments, results, out)
    return 0


def _drawn(arguments: argparse.Namespace, out: Path, stack: ExitStack) -> Results:
    """Answers from a model."""
    from r3.config import validate
    from r3.errors import ConfigError
    from r3.evaluate.run import evaluate_model
    from r3.method.reflection import plain_prompt
    from r3.policy.model import Policy
    from r3.rollout.protocol import Sampling
    from r3.tasks.prompting import Prompting
    from r3.train.build import make_engine

    model = {"path": arguments.model, "device": arguments.device, "dtype": arguments.dtype}
    config = validate({"model": model, "rollout": {"engine": arguments.engine, "max_rows": arguments.max_rows}})
    policy = Policy.load(config.model)
    prompting = Prompting(chat=not arguments.plain and bool(getattr(policy.tokenizer, "chat_template", None)))
    benchmarks = _benchmarks(arguments, prompting, stack)
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
        about={"model": arguments.model, "grader": _grader(arguments), "chat": prompting.chat},
        notes=_notes(arguments),
        ks=arguments.k,
        seed=arguments.seed,
        progress=_progress(),
    )


def _scored(arguments: argparse.Namespace, out: Path, stack: ExitStack) -> Results:
    """Answers from a file."""
    from r3.evaluate.run import score_responses
    from r3.evaluate.saved import SavedResponses
    from r3.tasks.prompting import Prompting

    benchmarks = _benchmarks(arguments, Prompting(), stack)
    tasks = {benchmark.name: benchmark.queries for benchmark in benchmarks}
    saved = SavedResponses(arguments.responses, tasks, count_tokens=_token_counter(arguments.model))
    about = {"responses": str(arguments.responses), "grader": _grader(arguments)}
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


def _benchmarks(arguments: argparse.Namespace, prompting: Prompting, stack: ExitStack) -> list[Benchmark]:
    """The tasks of the command line, cut down to the hard subset and the limit."""
    from r3.evaluate.run import Benchmark
    from r3.evaluate.subset import check_fresh, chosen, hard_subset
    from r3.tasks.datasets import CODE, SETS, load_file, load_set

    found: list[Benchmark] = []
    judge: Judge | None = None
    code_judge: Judge | None = None
    for name in arguments.tasks:
        if name == EMBEDDED_TASK:
            found.append(_embedded_benchmark())
            continue
        title = SETS[name].title if name in SETS else Path(name).stem
        if name in CODE or arguments.judge == "code":
            code_judge = code_judge or _closed_by(stack, _code_judge(arguments.sandbox))
            found.append(Benchmark(name, title, _code(name, arguments, prompting), code_judge, extract=_no_vote))
            continue
        judge = judge or _closed_by(stack, _maths_judge(arguments.judge))
        queries = (
            load_set(name, folder=arguments.data, prompting=prompting)
            if name in SETS or not Path(name).suffix
            else load_file(Path(name), prompting=prompting)
        )
        found.append(Benchmark(name, title, queries, judge))
    if arguments.hard_subset_from is not None:
        source = arguments.hard_subset_from
        if arguments.responses is None:
            check_fresh(source, arguments.model, arguments.seed)
        hard = chosen(hard_subset(source, arguments.hard_at_most), arguments.tasks, source)
        found = [_only(mark, [query for query in mark.queries if query.id in hard[mark.name]]) for mark in found]
    return [_only(mark, mark.queries[: arguments.limit]) for mark in found]


def _closed_by(stack: ExitStack, judge: Judge) -> Judge:
    stack.callback(judge.close)
    return judge


def _only(benchmark: Benchmark, queries: Sequence[Query]) -> Benchmark:
    from dataclasses import replace

    return replace(benchmark, queries=queries)


def _embedded_benchmark() -> Benchmark:
    from r3.config import load_config
    from r3.evaluate.run import Benchmark
    from r3.tasks import load_task

    task = load_task(load_config(None).task, seed=0)

    return Benchmark(EMBEDDED_TASK, "Arithmetic", task.heldout, task.judge, extract=_after_mark)


def _after_mark(text: str) -> str | None:
    _, mark, answer = text.rpartition("#")
    return answer.strip() if mark else None


def _code(name: str, arguments: argparse.Namespace, prompting: Prompting) -> Sequence[Query]:
    """Problems of code, with the instruction of the code task in place of that for maths."""
    from dataclasses import replace

    from r3.tasks.code import load_code
    from r3.tasks.settings import CodeSettings

    instruction = CodeSettings.model_fields["instruction"].default
    return load_code(name, replace(prompting, instruction=instruction), arguments.data)


def _no_vote(_: str) -> None:
    """Programs are not counted for a majority: those that do the same are seldom the same text."""


def _code_judge(walls: Any) -> Judge:
    from r3.verify.code import CodeVerifier
    from r3.verify.sandbox import SandboxSettings

    verifier = CodeVerifier(SandboxSettings(walls=walls))
    verifier.start()  # a machine that cannot isolate code is found out before answers are drawn
    return verifier


def _maths_judge(name: str) -> Judge:
    from r3.tasks.files import boxed_verdict
    from r3.verify import MathVerifier
    from r3.verify.base import PlainJudge

    return PlainJudge(boxed_verdict) if name == "boxed" else MathVerifier()


def _grader(arguments: argparse.Namespace) -> str:
    """What the verdicts depend on: the grader and its version."""
    from r3 import __version__
    from r3.tasks.datasets import CODE

    others = [name for name in arguments.tasks if name != EMBEDDED_TASK and name not in CODE]
    judges = [arguments.judge] if others else []
    judges += ["code"] if set(arguments.tasks) & set(CODE) and "code" not in judges else []
    judge = " and ".join(judges) or "the task's own"
    return f"{judge}, r3 {__version__}"


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
    from r3.policy.model import load_tokenizer, resolve
    from r3.policy.settings import ModelSettings

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


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in (part.strip() for part in text.split(",")) if name))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
