"""The arena: every remedy for groups that teach nothing, on equal generated tokens, each at a rate tuned for it.

    python -m tools.arena                                    (make arena)
    python -m tools.arena --beds sums --stages tune          one bed, the learning rates alone
    python -m tools.arena --stages page                      the page again, from docs/results/raw/arena-*.json

Made of comparisons as `r3 compare` runs them, below --out: BED/tuning, where every method meets every rate on seeds
that the table does not have and with a smaller budget, and BED/final, where each has the rate that did best for it.
Methods that are shown demonstrations, hints or right answers have a table of their own beside GRPO and R³, whose cells
there are those of the sums' table. The same command goes on where it was stopped.
What is compared and what came of it stands in docs/results/arena.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.commands.compare import seeds as seeds_of
from r3.compare.analysis import Comparison
from r3.compare.plan import RATE, Plan, make_plan, save_plan
from r3.compare.records import Record, condense, read_records
from r3.compare.runner import held, run_cells
from r3.errors import FAILED, SIGNALS, ConfigError, R3Error
from r3.method.presets import METHODS
from tools import arena_page

BASELINE = "grpo"
ABLATIONS = ("r3-no-replay", "r3-no-reflection", "r3-no-ranking")
"""R³'s ablations have comparisons of their own."""
HELPED = ("luffy", "sage", "critique")
"""Shown demonstrations, hints or right answers, which the others never see: they have a table of their own."""
CHANGED = {
    "exgrpo-at-once": "exgrpo,method.revisit.start_at=null",
    "critique-verdict": "critique,method.critique.feedback=verdict,"
    r'method.critique.template="{question}\nwrong: {attempt}\nretry:"',
}
"""Variants beside the presets: where few answers are right ExGRPO as published would never start; and critiques that
say no more than that an answer is wrong."""
SHARED = ("train.updates_per_batch=2",)
"""Two updates per batch: with one, no ratio ever leaves 1, and methods that differ in their clip alone are one."""
STAGES = ("tune", "final", "page")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A command of `r3` that a bed's model comes from, and what it leaves."""

    made: str
    arguments: tuple[str, ...]
    run: str | None = None
    """Its run directory, where it can be resumed."""


@dataclass(frozen=True, slots=True)
class Bed:
    """A task with a model that all methods start from, and what a cell may spend on it."""

    recipe: str | None
    tokens: int
    tuning_tokens: int
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
    evaluations: int = 4
    overrides: tuple[str, ...] = SHARED
    lessons: tuple[Lesson, ...] = ()
    methods: tuple[str, ...] = ()
    """Whose table it is; none named: all that need no help."""
    cells: str | None = None
    """The bed whose cells it shares, so that none is run twice; None: it has its own."""


_SUMS = "recipes/compare-embedded.yaml"
_WORDS = "recipes/sft-spelling-tiny.yaml"
_TEN = "task.options={min_word_len: 10, max_word_len: 10}"
_ANSWERS = "runs/answers-spelling-tiny"
SPELLING = (
    Lesson("models/tiny", ("models", "make", "tiny")),
    Lesson("runs/sft-spelling-tiny/model", ("sft", _WORDS)),
    Lesson(
        f"{_ANSWERS}/checkpoints",
        (
            *("train", "--quiet", "recipes/spelling-tiny.yaml", "method=grpo", "task.split=warm"),
            *(
                "model.path=runs/sft-spelling-tiny/model",
                "task.size=1600",
                "train.steps=1",
                "train.queries_per_step=1600",
            ),
            *("rollout.group_size=2", "evaluate.samples=1", f"run.dir={_ANSWERS}"),
        ),
        run=_ANSWERS,
    ),
    Lesson(
        "runs/longer-spelling-tiny/model",
        (
            *("sft", _WORDS, "model.path=runs/sft-spelling-tiny/model", _TEN, "task.size=1600"),
            *(f"task.retries_from={_ANSWERS}", "train.steps=40", "train.learning_rate=5e-4", "train.warmup_updates=2"),
            "run.dir=runs/longer-spelling-tiny",
        ),
    ),
)
"""The commands that stand in recipes/sft-spelling-tiny.yaml."""
BEDS = {
    "sums": Bed(_SUMS, tokens=120_000, tuning_tokens=60_000),
    "sums-with-help": Bed(_SUMS, tokens=120_000, tuning_tokens=60_000, methods=(BASELINE, "r3", *HELPED), cells="sums"),
    "spelling": Bed("recipes/spelling-tiny.yaml", tokens=200_000, tuning_tokens=80_000, lessons=SPELLING),
}


class Stopped(Exception):
    """A signal ended it; the same command goes on."""

    def __init__(self, by: str) -> None:
        self.by = by


def contestants() -> list[str]:
    """All presets that are shown nothing that the others are not, the baseline first."""
    return [*(name for name in METHODS if name not in (*ABLATIONS, *HELPED)), *CHANGED]


def methods_of(bed: Bed, named: Sequence[str] | None) -> list[str]:
    """Whose table it is: the bed's own methods, or those of them that the command line names."""
    own = list(bed.methods or contestants())
    if named is None:
        return own
    return [name for name in named if name in (own if bed.methods else [*contestants(), *ABLATIONS])]


def teach(bed: Bed) -> None:
    """Make the bed's model where it is not there yet."""
    for lesson in bed.lessons:
        if Path(lesson.made).exists():
            continue
        begun = lesson.run is not None and Path(lesson.run).exists()
        arguments = ("train", "--quiet", "--resume", str(lesson.run)) if begun else lesson.arguments
        _say(f"r3 {' '.join(arguments)}")
        subprocess.run([sys.executable, "-m", "r3", *arguments], check=True)


def tuning_plan(bed: Bed, methods: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Every method at every rate, with the smaller budget."""
    tried = [f"{_at(name, rate)}={CHANGED.get(name, name)},{RATE}={rate:g}" for name in methods for rate in bed.rates]
    return make_plan(
        bed.recipe, bed.overrides, methods=(), variants=tried, seeds=seeds, tokens=bed.tuning_tokens, evaluations=1,
        baseline=None,
    )  # fmt: skip


def _at(method: str, rate: float) -> str:
    return f"{method}-at-{rate:g}"


def tuning_of(out: Path, bed: Bed, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """What the tuning found: each method's final pass@1 at each rate, seed by seed, and the rate that is taken."""
    comparison = Comparison.read(out)
    finals: dict[str, dict[str, list[float]]] = {}
    for name in methods:
        finals[name] = {
            f"{rate:g}": [
                round(float(curve[:, -1].mean()), 6)
                for curve in comparison.curves(_at(name, rate), "pass@1", seeds)
            ]
            for rate in bed.rates
        }  # fmt: skip
    chosen = {name: best_rate(finals[name]) for name in methods}
    return {"tokens": bed.tuning_tokens, "seeds": list(seeds), "finals": finals, "chosen": chosen}


def best_rate(finals: dict[str, list[float]]) -> str:
    """The rate with the best mean, the lower one if two are equal; one that lost a seed (diverged) is not taken.

    >>> best_rate({"1e-05": [0.2, 0.4], "0.0001": [0.1, 0.5], "0.001": [0.9]})
    '1e-05'
    """
    whole = max(len(values) for values in finals.values())
    known = {rate: sum(values) / whole for rate, values in finals.items() if values and len(values) == whole}
    if not known:
        raise ConfigError("no rate has a finished cell: see the logs below tuning/cells, and lower the rates")
    return max(known, key=lambda rate: (known[rate], -float(rate)))


def final_plan(bed: Bed, chosen: dict[str, str], seeds: Sequence[int]) -> Plan:
    """Each method at its own rate."""
    return make_plan(
        bed.recipe, bed.overrides, methods=(),
        variants=[f"{name}={CHANGED.get(name, name)},{RATE}={rate}" for name, rate in chosen.items()],
        seeds=seeds, tokens=bed.tokens, evaluations=bed.evaluations, baseline=BASELINE,
    )  # fmt: skip


def run(plan: Plan, out: Path, jobs: int) -> int:
    """The cells of a plan that are not finished yet; how many failed."""
    with held(out):
        save_plan(plan, out)
        done = run_cells(plan, out, jobs=jobs, keep=False, say=_say)
    if done.stopped_by is not None:
        raise Stopped(done.stopped_by)
    for cell in done.failed:
        print(f"arena: {cell} failed; its log: {cell.log}", file=sys.stderr)
    return len(done.failed)


def compete(name: str, bed: Bed, chosen: argparse.Namespace) -> int:
    """Tune and compare on one bed, as far as the stages say; how many final cells failed."""
    out, methods = chosen.out / (bed.cells or name), methods_of(bed, chosen.methods)
    if methods == [BASELINE]:
        _say(f"{name}: none of --methods is in its table")
        return 0
    teach(bed)
    if "tune" in chosen.stages:
        _say(f"{name}: learning rates")
        run(tuning_plan(bed, methods, chosen.tuning_seeds), out / "tuning", chosen.jobs)  # a rate may well diverge
    tuning = tuning_of(out / "tuning", bed, methods, chosen.tuning_seeds)
    for method, rate in tuning["chosen"].items():
        _say(f"{name}: {method} takes {rate}")
    if "final" not in chosen.stages:
        return 0
    failed = run(final_plan(bed, tuning["chosen"], chosen.seeds), out / "final", chosen.jobs)
    plan, records = of_table(*read_records(out / "final"), methods, chosen.seeds)
    path = chosen.results / "raw" / f"{arena_page.PREFIX}{name}.json"
    condense({**plan, "commit": _commit(), "tuning": tuning}, records, path)
    _say(f"{path}: {len(records)} cells")
    return failed


def of_table(
    plan: dict[str, Any], records: Sequence[Record], methods: Sequence[str], seeds: Sequence[int]
) -> tuple[dict[str, Any], list[Record]]:
    """A comparison without the cells that other tables share its folder for."""
    variants = {name: plan["variants"][name] for name in methods}
    kept = [record for record in records if record.variant in variants and record.seed in seeds]
    return {**plan, "variants": variants, "seeds": list(seeds)}, kept


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _say(text: str) -> None:
    print(text, flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.arena", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--beds", default=",".join(BEDS), metavar="A,B", help=f"of {', '.join(BEDS)} (all)")
    add("--methods", metavar="A,B", help="presets and variants, each in the tables that it belongs to (all)")
    add("--stages", default=",".join(STAGES), metavar="A,B", help=f"of {', '.join(STAGES)} (all)")
    add("--seeds", type=seeds_of, default=range(20, 28), metavar="A-B", help="of the table (20-27)")
    add("--tuning-seeds", type=seeds_of, default=range(100, 102), metavar="A-B", help="of the rates (100-101)")
    add("--rates", metavar="X,Y", help="learning rates to try (each bed's own)")
    add("--tokens", type=int, metavar="N", help="generated tokens of a cell of the table (each bed's own)")
    add("--tuning-tokens", type=int, metavar="N", help="the same where rates are chosen (each bed's own)")
    add("--evaluations", type=int, metavar="N", help="points on the curve after the start (each bed's own)")
    add("--set", action="append", default=[], metavar="key=value", help="a setting for all cells; repeatable")
    add("--jobs", type=int, default=2, metavar="N", help="cells side by side (2)")
    add("--out", type=Path, default=Path("compare/arena"), metavar="DIR", help="where the cells go (compare/arena)")
    add("--results", type=Path, default=arena_page.RESULTS, metavar="DIR", help="where the page goes (docs/results)")
    return parser


def bed_of(name: str, chosen: argparse.Namespace) -> Bed:
    """A bed with what the command line changes of it."""
    bed = BEDS[name]
    rates = bed.rates if chosen.rates is None else tuple(float(rate) for rate in chosen.rates.split(","))
    return replace(
        bed,
        rates=rates,
        tokens=chosen.tokens or bed.tokens,
        tuning_tokens=chosen.tuning_tokens or bed.tuning_tokens,
        evaluations=chosen.evaluations or bed.evaluations,
        overrides=(*bed.overrides, *chosen.set),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options().parse_args(arguments)
    try:
        chosen.beds = _known(chosen.beds, BEDS, "--beds")
        chosen.stages = _known(chosen.stages, STAGES, "--stages")
        if chosen.methods is not None:
            chosen.methods = _known(chosen.methods, (*METHODS, *CHANGED), "--methods")
        if chosen.methods is not None and BASELINE not in chosen.methods:
            raise ConfigError(f"--methods: {BASELINE} must be among them, since all others are measured against it")
        if chosen.jobs < 1:
            raise ConfigError(f"--jobs {chosen.jobs}: at least 1")
        failed = 0
        if {"tune", "final"} & set(chosen.stages):
            failed = sum(compete(name, bed_of(name, chosen), chosen) for name in chosen.beds)
        if "page" in chosen.stages:
            print(arena_page.write(chosen.results))
    except Stopped as stopped:
        _say(f"stopped by {stopped.by}; the same command goes on")
        return SIGNALS[stopped.by]
    except R3Error as error:
        print(f"arena: {error}", file=sys.stderr)
        return error.exit_code
    return FAILED if failed else 0


def _known(text: str, known: Any, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: no {name!r}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
