"""Comparisons on a real LLM for docs/results.md, from nothing to raw numbers, on one GPU.

    R3_DATA=… python recipes/evidence.py [sums reversal longer-lists spelling …] [--jobs 12] [--seeds 3]

For each task: SmolLM2-135M learns a written procedure on easy problems (`r3 sft`), answers more of them, and learns to
try again where it failed (the paper's model could do that beforehand). This warm start is tried on a ladder of harder
problems, and the rung where about one answer in fifty is right is taken; a task without one is left out. There it tries
each of many problems 32 times, and `r3 compare` trains on those that it solved once or twice; held-out problems are
as they come. All of that is settled before any method has run, so no method can have been favoured by it. (Words in
reverse order are the exception: pilots on seeds 0 and 1 led to lists of six words and more, few of them, and to small
batches for all tasks. Such a comparison is to be of other seeds.)
Every command is printed; what is finished is not done again. Small cells leave most of a card idle: with NVIDIA's MPS
(`nvidia-cuda-mps-control -d`) a dozen share it well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from r3.commands.compare import seeds

RECIPES = Path(os.path.relpath(Path(__file__).parent))
MODEL = Path("models/smollm2-135m")
WANTED = 0.02
"""Held-out pass@1 at the start. At 1 %, of all problems, nine solve-none groups in ten had nothing to replay."""
FEWEST, MOST = 0.005, 0.06
"""A rung outside of these is no place to start from: next to nothing to find, or too much."""
ALL = ("grpo", "dapo", "r3", "r3-no-replay", "r3-no-reflection", "r3-no-ranking")
FEW = ("grpo", "dapo", "r3")
SIZES = (
    *("train.queries_per_step=8", "rollout.group_size=8", "method.reflection.give_up_after=8"),
    "train.tokens_per_microbatch=4096",
)
"""Of every task. The lists and the sums solved seldom ran so; the other results have the sizes that they state."""
SURVEY = ("method=grpo", "train.steps=1", "rollout.group_size=32", "evaluate.samples=1", "run.tensorboard=false")
SELDOM = ("task.min_pass_rate=0.03", "task.max_pass_rate=0.07")
"""One answer of 32 is right, or two."""


@dataclass(frozen=True)
class Task:
    """A task: its recipes, what the warm start learns from, and the ladder of harder problems."""

    warm: tuple[str, ...] = ()
    """Settings of the easy problems."""
    again: tuple[str, ...] = ("task.split=warm", "task.size=1000", "run.seed=1")
    """Which easy problems it answers and then tries again: others than it learnt the procedure from."""
    every: tuple[str, ...] = ()
    """Settings of every rung."""
    ladder: tuple[tuple[str, ...], ...] = ((),)
    recipe: str = "puzzles-smollm2"
    lesson: str = "sft-puzzles-smollm2"
    methods: tuple[str, ...] = FEW
    size: int | None = 512
    """Training problems of a seed, before the survey chooses among them; None: all rows of a file."""
    surveyed: bool = True
    """Whether to train on those alone that the survey found to be solved seldom."""
    after: str | None = None
    """The task whose warm start this one has, if not its own."""
    tokens: int = 800_000
    """Generated tokens of a cell: for a hundred steps of GRPO and more, but on GSM8K."""


def rung_of(options: str, limit: int) -> tuple[str, str]:
    """A rung, and a length limit that a written solution of it keeps, but not by much."""
    return options, f"rollout.max_tokens={limit}"


SUMS = ("task.name=graded-arithmetic",)
SPELLING, REWRITING = ("task.family=spell_backward",), ("task.family=ab",)
REVERSAL, FILTERING = ("task.family=word_sequence_reversal",), ("task.family=number_filtering",)
# Others are not here: of number_sorting and knights_knaves, learnt with four numbers and two people, next to nothing
# was right with five numbers or three people; letter_counting hardly gets harder with more words.
TASKS = {
    "sums": Task(
        warm=(*SUMS, "task.difficulty=[2,3,4]"),
        every=SUMS,
        ladder=tuple(rung_of(f"task.difficulty=[{n}]", 14 * n) for n in (5, 6, 7)),
        tokens=600_000,
    ),
    "spelling": Task(
        warm=(*SPELLING, "task.options={min_word_len: 3, max_word_len: 5}"),
        every=SPELLING,
        ladder=tuple(
            rung_of(f"task.options={{min_word_len: {fewest}, max_word_len: {most}}}", limit)
            # Longer words alone gave nothing: each rung keeps those of six letters.
            for fewest, most, limit in ((6, 6, 36), (6, 7, 38), (6, 9, 42), (6, 11, 46))
        ),
        tokens=600_000,
    ),
    "rewriting": Task(
        warm=(*REWRITING, "task.options={length: 6}", "task.size=1500"),
        every=REWRITING,
        ladder=tuple(
            rung_of(f"task.options={{length: {n}}}", limit)
            for n, limit in ((7, 128), (8, 160), (10, 240), (12, 288), (14, 384), (16, 480))
        ),
        tokens=2_000_000,
    ),
    "reversal": Task(
        warm=(*REVERSAL, "task.options={min_words: 3, max_words: 5}"),
        every=REVERSAL,
        # Six words are right in one answer of thirty, more of them never: they come within reach one by one.
        ladder=(rung_of("task.options={min_words: 6, max_words: 9}", 117),),
        methods=ALL,
        size=32,
        surveyed=False,
        tokens=400_000,
    ),
    "longer-lists": Task(
        after="reversal",
        every=REVERSAL,
        ladder=(rung_of("task.options={min_words: 6, max_words: 12}", 156),),
        size=32,
        surveyed=False,
        tokens=600_000,
    ),
    "filtering": Task(
        warm=(*FILTERING, "task.options={min_numbers: 3, max_numbers: 5, max_decimals: 1}"),
        every=FILTERING,
        ladder=tuple(
            rung_of(f"task.options={{min_numbers: {n}, max_numbers: {n}, max_decimals: 1}}", 12 * n + 6)
            for n in (5, 6, 7, 9, 12, 15, 20, 26)
        ),
        tokens=1_600_000,
    ),
    "gsm8k": Task(
        again=("task.rows=[0,1064]", "task.heldout=64"),  # there are no others to spare
        size=None,
        recipe="gsm8k-smollm2",
        lesson="sft-gsm8k-smollm2",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument(
        "--until", choices=("warm", "rung", "survey", "compare"), default="compare", help="stop after this stage"
    )
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side")
    parser.add_argument("--seeds", type=seeds, default=range(3), metavar="N|A-B", help="as of r3 compare")
    parser.add_argument("--methods", help="of the comparison, instead of the task's own")
    parser.add_argument("--tokens", type=int, help="generated tokens of a cell, whatever the task")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="a setting over all recipes'")
    options = parser.parse_args()
    if unknown := set(options.tasks) - TASKS.keys():
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    names = options.tasks or list(TASKS)
    if not MODEL.exists():
        run(["models", "fetch", MODEL.name])
    together([lessons(name, options.set) for name in {warm_start_of(name): None for name in names}], options.jobs)
    if options.until == "warm":
        return
    together([[probe(name, place, options.set)] for name in names for place in rungs_to_try(name)], options.jobs)
    chosen = {name: rung(name) for name in names}
    if options.until == "rung":
        return
    there = {name: place for name, place in chosen.items() if place is not None}
    together([[one] for name, place in there.items() for one in surveys(name, place, options)], options.jobs)
    if options.until == "survey":
        return
    for name, place in there.items():
        run(comparison(name, place, options))


def r3(arguments: Sequence[str]) -> list[str]:
    print("$ r3", shlex.join(arguments), flush=True)
    return [sys.executable, "-m", "r3", *arguments]


def run(arguments: Sequence[str]) -> None:
    subprocess.run(r3(arguments), check=True)


def together(sequences: Sequence[Sequence[list[str]]], jobs: int) -> None:
    """So many sequences of commands at once; what they say goes to evidence.log."""
    with Path("evidence.log").open("ab") as log, ThreadPoolExecutor(jobs) as pool:

        def failing(sequence: Sequence[list[str]]) -> list[str] | None:
            return next((one for one in sequence if subprocess.call(r3(one), stdout=log, stderr=log) != 0), None)

        failed = [command for command in pool.map(failing, sequences) if command is not None]
    if failed:
        raise SystemExit("failed, see evidence.log: " + "; ".join(shlex.join(command) for command in failed))


def warm_start_of(name: str) -> str:
    return TASKS[name].after or name


def model_of(name: str) -> Path:
    return Path("runs") / f"retry-{warm_start_of(name)}" / "model"


def lessons(name: str, more: Sequence[str]) -> list[list[str]]:
    """What is still to do of: learn the procedure, answer other easy problems, learn to try again what was wrong."""
    task, first, answered = TASKS[name], Path("runs") / f"sft-{name}", Path("runs") / f"answers-{name}"
    lesson, recipe = str(RECIPES / f"{task.lesson}.yaml"), recipe_of(name)
    once = ["method=grpo", "train.steps=1", "train.queries_per_step=1000", "rollout.group_size=2", "evaluate.samples=1"]
    begin = ["sft", lesson, *task.warm, *more, f"run.dir={first}"]
    easy = [f"model.path={first / 'model'}", *task.warm, *task.again, *more]
    answer = ["train", "--quiet", recipe, *easy, *once, "rollout.max_tokens=320", f"run.dir={answered}"]
    retry = ["sft", lesson, *easy, "train.epochs=1", "train.learning_rate=1e-4", f"task.retries_from={answered}"]
    steps = [
        (first / "model", begin),
        (answered / "checkpoints", answer),
        (model_of(name), [*retry, f"run.dir={model_of(name).parent}"]),
    ]
    return [command for made, command in steps if not made.exists()]


def settings(name: str, place: int) -> list[str]:
    """Of a rung of the task's ladder, over its recipe's."""
    task = TASKS[name]
    size = [] if task.size is None else [f"task.size={task.size}"]
    return [*SIZES, *size, f"model.path={model_of(name)}", *task.every, *task.ladder[place]]


def recipe_of(name: str) -> str:
    return str(RECIPES / f"{TASKS[name].recipe}.yaml")


def probe_path(name: str, place: int) -> Path:
    return Path("runs") / f"probe-{name}-{place}"


def rungs_to_try(name: str) -> list[int]:
    """Those of a ladder with several, as far as they were not tried before."""
    places = range(len(TASKS[name].ladder))
    return [place for place in places if len(places) > 1 and not (probe_path(name, place) / "metrics.jsonl").exists()]


def probe(name: str, place: int, more: Sequence[str]) -> list[str]:
    """One step, for the evaluation before it."""
    short = ["method=grpo", "train.steps=1", "evaluate.samples=16", f"run.dir={probe_path(name, place)}"]
    return ["train", "--quiet", recipe_of(name), *settings(name, place), *more, *short]


def rung(name: str) -> int | None:
    """The rung whose pass@1 at the start is nearest to what is wanted, in the logarithm; None if none is near."""
    if len(TASKS[name].ladder) == 1:
        return 0
    found = []
    for place in range(len(TASKS[name].ladder)):
        first = (probe_path(name, place) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
        found.append(float(json.loads(first)["heldout/accuracy"]))
    chosen = min(range(len(found)), key=lambda i: abs(math.log(max(found[i], 1e-4) / WANTED)))
    fits = FEWEST <= found[chosen] <= MOST
    verdict = f"taken: {TASKS[name].ladder[chosen]}" if fits else "none is a place to start from; left out"
    print(f"{name}: pass@1 by rung {', '.join(f'{x:.1%}' for x in found)}; {verdict}")
    return chosen if fits else None


def surveys(name: str, place: int, options: argparse.Namespace) -> list[list[str]]:
    """What is still to do of: every seed's problems, 32 answers each."""
    if not TASKS[name].surveyed:
        return []
    missing = [s for s in options.seeds if not (Path(survey_path(name).format(seed=s)) / "checkpoints").exists()]
    common = ["train", "--quiet", recipe_of(name), *settings(name, place), *options.set, *SURVEY]
    common.append(f"train.queries_per_step={TASKS[name].size or 1000}")
    return [[*common, f"run.seed={seed}", f"run.dir={survey_path(name)}"] for seed in missing]


def survey_path(name: str) -> str:
    return f"runs/survey-{name}-{{seed}}"


def comparison(name: str, place: int, options: argparse.Namespace) -> list[str]:
    task, last = TASKS[name], options.seeds[-1]
    counts = ["--seeds", f"{options.seeds[0]}-{last}", "--tokens", str(options.tokens or task.tokens)]
    which = ["--methods", options.methods] if options.methods else ["--methods", ",".join(task.methods)]
    where = ["--evaluations", "12", "--jobs", str(options.jobs), "--no-report", "--out", f"compare/{name}"]
    among = [f"task.pass_rates_from={survey_path(name)}", *SELDOM] if task.surveyed else []
    overrides = [*settings(name, place), *among, *options.set]
    return ["compare", recipe_of(name), *overrides, *which, *counts, *where]


if __name__ == "__main__":
    main()
