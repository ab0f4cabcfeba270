"""`r3 probe`: before a long run, which mechanism will pay on this model and data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.config import Config

EPILOG = """\
examples:
  r3 probe                                             the embedded default
  r3 probe recipes/deepscaler-1.5b.yaml --out probe    also probe/probe.json, report.txt and recipe.yaml
  r3 train probe/recipe.yaml                           train with the advised settings

Trains nothing. The same recipe, run.seed and --tokens give the same answers and numbers.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 probe`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="a recipe; without one, the embedded default")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens to generate at most (default: 512 groups at full length)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder for probe.json, report.txt, recipe.yaml")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Probe and report; returns the exit code."""
    from rich.console import Console

    from r3.config import load_config
    from r3.probe.draw import budget_of

    recipe, overrides = arguments.recipe, list(arguments.overrides)
    if recipe is not None and "=" in recipe:  # no recipe, overrides only
        recipe, overrides = None, [recipe, *overrides]
    config = load_config(Path(recipe) if recipe else None, overrides)
    budget = budget_of(arguments.tokens, config.rollout.group_size, config.rollout.max_tokens)
    _refuse_places(arguments.json, arguments.out)
    _probe(config, budget, recipe, arguments, Console(stderr=True))
    return 0


def _refuse_places(file: Path | None, folder: Path | None) -> None:
    """Before a token is drawn."""
    from r3.errors import ConfigError

    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--json {file}: not a file in a folder that is there; make the folder first")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: there is something already; name a new or an empty folder")


def _probe(config: Config, budget: int, recipe: str | None, arguments: argparse.Namespace, status: Any) -> None:
    import io
    import json
    import logging

    from rich.console import Console

    from r3 import __version__
    from r3.probe.advice import advise, laid_over, settings, show, snippet
    from r3.probe.draw import draw
    from r3.probe.findings import as_dict, measure
    from r3.run.disk import write_atomically
    from r3.train.build import build
    from r3.train.record import peak_memory_gb

    logging.basicConfig(level=logging.WARNING, format="r3: %(message)s")
    with status.status("r3: loading") as spinner:
        parts = build(config)
        try:
            drawn = draw(parts, budget, lambda what: spinner.update(f"r3: {what}"))
        finally:
            parts.task.judge.close()
        spinner.update("r3: intervals")
        findings = measure(
            drawn,
            config.rollout.max_tokens,
            peak_fraction=config.method.ranking.peak_fraction,
            seed=config.run.seed,
        )
    advice = advise(findings, config)
    follow = settings(advice, findings)
    spent = sum(drawn.tokens.values())
    speed = spent / max(1e-9, drawn.seconds)
    report = {
        "r3": __version__,
        "recipe": recipe or "the embedded default",
        "model": config.model.path,
        "task": config.task.name,
        "seed": config.run.seed,
        "tokens": {"budget": budget, "generated": spent, **drawn.tokens},
        "findings": as_dict(findings),
        "advice": as_dict(advice),
        "settings": follow,
        "machine": {"seconds": drawn.seconds, "tokens_per_second": speed, "peak_memory_gb": peak_memory_gb()},
    }
    head = (
        f"Probe of {report['recipe']}: model {config.model.path}, task {config.task.name}, seed {config.run.seed}\n"
        f"{spent:,} tokens of at most {budget:,}, {speed:,.0f} tokens/s, {drawn.seconds:,.0f} s, peak memory "
        f"{peak_memory_gb():.2f} GB\n"
    )
    text = io.StringIO()
    for console in (Console(width=None), Console(file=text, width=120)):
        show(console, findings, advice, follow, head)
    numbers = (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode()
    if arguments.json is not None:
        write_atomically(arguments.json, numbers)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.out / "probe.json", numbers)
        write_atomically(arguments.out / "report.txt", text.getvalue().encode())
        note = f"# What r3 probe advises for {report['recipe']}, over it:\n"
        note += "".join(f"#   {line}\n" for line in snippet(follow).splitlines())
        write_atomically(arguments.out / "recipe.yaml", (note + laid_over(config, follow)).encode())
