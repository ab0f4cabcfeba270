"""`r3 compare`: methods against each other on equal budgets of generated tokens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

METHODS = "grpo,dapo,r3,r3-no-replay,r3-no-reflection,r3-no-ranking"

EPILOG = """\
examples:
  r3 compare recipes/compare-embedded.yaml --seeds 5 --tokens 400000 --jobs 2
  r3 compare RECIPE --methods grpo,r3 --variant young=r3,method.replay.max_age=8 --seeds 3 --tokens 2000000
  r3 compare --report-only compare/my-recipe            write the report again from the raw numbers

Started again with the same settings, a comparison that was stopped goes on; more seeds and more variants may join.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 compare`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("recipe", nargs="?", metavar="RECIPE.yaml", help="a recipe; without one, the embedded default")
    add("overrides", nargs="*", metavar="key=value", help="settings over the recipe's, the same for every method")
    add("--methods", default=METHODS, metavar="A,B", help=f"methods to compare, of r3 methods ({METHODS})")
    add("--variant", action="append", default=[], metavar="NAME=PRESET,key=value", help="a preset changed; repeatable")
    add("--seeds", type=seeds, default=range(3), metavar="N|A-B", help="seeds 0 to N-1 of every method (3), or A to B")
    looked_at = "seeds that settings were chosen on, as in --seeds: the report makes no claim from them"
    add("--looked-at", type=seeds, default=(), metavar="N|A-B", help=looked_at)
    add("--tokens", type=_positive, metavar="N", help="generated tokens that every cell may spend")
    add("--evaluations", type=_positive, default=8, metavar="N", help="evaluations on the way, equally spaced (8)")
    add("--baseline", metavar="NAME", help="what the others are measured against (grpo)")
    add("--level", type=float, metavar="X", help="also give the tokens to this held-out pass@1, e.g. 0.2")
    claim = "what you expect, for the report to judge: 'r3 > grpo', 'r3 < 0.7 grpo in tokens'; repeatable"
    add("--claim", action="append", default=[], metavar="'A > B'", help=claim)
    add("--jobs", type=_positive, default=1, metavar="N", help="cells side by side (1)")
    add("--out", type=Path, metavar="DIR", help="where everything goes (compare/RECIPE)")
    add("--keep", action="store_true", help="keep checkpoints, buffers and rollouts of finished cells")
    add("--no-report", action="store_true", help="only run the cells; no matplotlib is needed for that")
    add("--report-only", type=Path, metavar="DIR", help="only write the report of the comparison in DIR again")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare; returns the exit code."""
    from r3.compare.plan import add_claims
    from r3.compare.report import write_report
    from r3.evaluate.curves import require_matplotlib

    if not arguments.no_report:
        require_matplotlib()
    if arguments.report_only is not None:
        if arguments.claim:
            add_claims(arguments.claim, arguments.report_only)
        print("report:", *write_report(arguments.report_only)[:2])
        return 0
    code, out = _run_cells(arguments)
    if not arguments.no_report and any((out / "raw").glob("*-seed*.json")):
        print("report:", *write_report(out)[:2])
    return code


def _run_cells(arguments: argparse.Namespace) -> tuple[int, Path]:
    from r3.compare.plan import make_plan, save_plan, undeclared
    from r3.compare.runner import held, run_cells
    from r3.errors import FAILED, SIGNALS, ConfigError

    recipe, overrides = arguments.recipe, list(arguments.overrides)
    if recipe is not None and "=" in recipe:  # no recipe, overrides only
        recipe, overrides = None, [recipe, *overrides]
    if arguments.tokens is None:
        raise ConfigError("r3 compare needs --tokens N: the generated tokens that every cell may spend")
    plan = make_plan(
        recipe,
        overrides,
        methods=[name.strip() for name in arguments.methods.split(",") if name.strip()],
        variants=arguments.variant,
        seeds=arguments.seeds,
        tokens=arguments.tokens,
        evaluations=arguments.evaluations,
        baseline=arguments.baseline,
        level=arguments.level,
        looked_at=arguments.looked_at,
        claims=arguments.claim,
    )
    out = arguments.out or Path("compare") / (Path(recipe).stem if recipe else "embedded")
    with held(out):
        for line in undeclared(plan, out):
            _say(line)
        save_plan(plan, out)
        done = run_cells(plan, out, jobs=arguments.jobs, keep=arguments.keep, say=_say)
    if done.stopped_by is not None:
        _say(f"stopped by {done.stopped_by}; the same command goes on")
        return SIGNALS[done.stopped_by], out
    for cell in done.failed:
        print(f"r3: {cell} failed; its log: {cell.log}", file=sys.stderr)
    return FAILED if done.failed else 0, out


def _say(text: str) -> None:
    print(text, flush=True)


def _positive(text: str) -> int:
    number = int(text.replace("_", "").replace(",", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def seeds(text: str) -> range:
    """`5` is 0 to 4, `5-9` is 5 to 9: fresh seeds, for a claim that was found on others."""
    first, dash, last = text.partition("-")
    if not dash:
        return range(_positive(text))
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seeds nor a range such as 5-9")
    return range(int(first), int(last) + 1)
