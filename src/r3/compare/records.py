"""What a comparison writes down: the numbers of its cells, and the claims that were made before them.

The raw numbers of a cell are a small JSON file made from a finished run's metrics; reports need nothing else. A
comparison's plan and cells are in its --out as raw/plan.json and a file per cell, or condensed into one file.

A claim is kept in the plan and judged in the report (`tables` has the verdicts). It is written so:

    r3 > grpo                  r3 ends with a higher held-out pass@1 than grpo
    r3 > grpo in pass@4        the same of pass@4, where the recipe draws four answers to a problem
    r3 < grpo in tokens        r3 reaches grpo's final pass@1 with fewer tokens than grpo itself
    r3 < 0.7 grpo in tokens    … with less than 0.7 times as many
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.errors import ConfigError, RunError
from r3.run import RunFiles, read_metrics
from r3.run.disk import write_atomically

BINS = 20
"""Points of a cell's training curves: steps are averaged within equal parts of the budget."""
SERIES = ("solve_none", "solve_all", "entropy", "truncated", "accuracy", "length/mean")
TOTALS = (
    "tokens/generated",
    "tokens/trained",
    "seconds/step",
    "groups",
    "groups/plain",
    "groups/reflection",
    "groups/teaching",
    "replay/samples",
    "replay/joined",
    "replay/cross_context",
    "reflection/solved",
    "ranking/samples",
    "ranking/groups",
    "update/count",
    "update/skipped",
    "forwards/extra",
)


@dataclass(frozen=True, slots=True)
class Record:
    """One finished cell."""

    variant: str
    seed: int
    command: str
    k: int
    """Answers per held-out problem: the k of its pass@k."""
    problems: int
    evaluations: Sequence[Mapping[str, Any]]
    """In order: step, tokens, pass@1, pass@k, truncated, length; and how many answers to each held-out problem were
    `right`, which cells of older runs do not have."""
    training: Mapping[str, Sequence[float | None]]
    totals: Mapping[str, float]
    versions: Mapping[str, str | None]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def record_of(directory: Path, *, variant: str, seed: int, command: str, tokens: int) -> Record:
    """The record of a finished run; refuses one that has not spent its tokens."""
    files = RunFiles(directory)
    lines = list(read_metrics(files.metrics_path))
    steps = [line for line in lines if line["step"] > 0]
    evaluated = [line for line in lines if "heldout/accuracy" in line]
    spent = sum(line["tokens/generated"] for line in steps)
    if spent < tokens or not evaluated:
        raise RunError(f"{directory}: has generated {spent:,} of {tokens:,} tokens; run the comparison again to go on")
    k = int(evaluated[0].get("heldout/samples", 1))
    return Record(
        variant=variant,
        seed=seed,
        command=command,
        k=k,
        problems=int(evaluated[0]["heldout/total"]) // k,
        evaluations=[_evaluation(line, k) for line in evaluated],
        training=_binned(steps, tokens),
        totals={"steps": len(steps)} | {key: _tidy(sum(_known(steps, key))) for key in TOTALS},
        versions=files.read_info()["versions"],
    )


def _evaluation(line: Mapping[str, Any], k: int) -> dict[str, Any]:
    numbers = {
        "step": line["step"],
        "tokens": line.get("tokens/total", 0),
        "pass@1": _tidy(line["heldout/accuracy"]),
        f"pass@{k}": _tidy(line.get(f"heldout/pass@{k}", line["heldout/accuracy"])),
        "truncated": _tidy(line["heldout/truncated"]),
        "length": _tidy(line["heldout/tokens"]),
    }
    each = line.get("heldout/right_each")  # runs of older versions have the sum alone
    return numbers if each is None else {**numbers, "right": each}


def _binned(steps: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, list[float | None]]:
    """Means over the steps of each twentieth of the budget; None where a long step skipped one."""
    bins: list[list[Mapping[str, Any]]] = [[] for _ in range(BINS)]
    for line in steps:
        # A step, which may be longer than a bin, belongs to the bin that its middle is in.
        middle = line["tokens/total"] - line["tokens/generated"] / 2
        bins[min(BINS - 1, int(BINS * middle / tokens))].append(line)
    return {
        "tokens": [_tidy(tokens * (place + 0.5) / BINS) for place in range(BINS)],
        **{key: [_mean(_known(part, key)) for part in bins] for key in SERIES},
    }


def _known(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = [line.get(key) for line in lines]
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def _mean(values: Sequence[float]) -> float | None:
    return _tidy(sum(values) / len(values)) if values else None


def _tidy(value: float) -> float:
    """Six significant digits: more than the numbers mean, and the files stay small."""
    return float(f"{value:.6g}")


def record_path(out: Path, variant: str, seed: int) -> Path:
    return out / "raw" / f"{variant}-seed{seed}.json"


def write_record(record: Record, out: Path) -> None:
    path = record_path(out, record.variant, record.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record.as_dict(), ensure_ascii=False) + "\n").encode())


def read_records(source: Path) -> tuple[dict[str, Any], list[Record]]:
    """The plan and the finished cells of a comparison, in the plan's order, from its --out or its condensed file."""
    plan, cells = _condensed(source) if source.is_file() else _folder(source)
    records = [Record(**cell) for cell in cells]
    if not records:
        raise RunError(f"{source}: no cell of the comparison is finished yet; run r3 compare again to go on")
    return plan, records


def _folder(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        plan = json.loads((out / "raw" / "plan.json").read_bytes())
    except OSError as error:
        raise RunError(f"{out}: no comparison there (no raw/plan.json); give the --out of an r3 compare") from error
    paths = [record_path(out, name, seed) for name in plan["variants"] for seed in plan["seeds"]]
    return plan, [json.loads(path.read_bytes()) for path in paths if path.exists()]


def _condensed(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        comparison = json.loads(path.read_bytes())
        return comparison["plan"], comparison["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a condensed comparison (a JSON file with a plan and cells)") from error


def condense(plan: Mapping[str, Any], records: Sequence[Record], path: Path) -> None:
    """The whole comparison as one JSON file with a line for each cell: equal numbers are equal bytes."""
    lines = [json.dumps(record.as_dict(), ensure_ascii=False) for record in records]
    head = json.dumps(plan, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = ",\n".join(lines)
    write_atomically(path, f'{{"plan": {head},\n"cells": [\n{cells}\n]}}\n'.encode())


SHAPE = re.compile(r"([\w.-]+)\s*([<>])\s*(?:(\d+(?:\.\d+)?)\s*[×x*]?\s+)?([\w.-]+)(?:\s+in\s+(\S+))?")


@dataclass(frozen=True, slots=True)
class Claim:
    """`ours` against `theirs`, in a metric: more of it, or less."""

    text: str
    ours: str
    theirs: str
    metric: str
    more: bool
    factor: float = 1.0
    """The share of theirs that ours stays below, for tokens."""


def parse(text: str, variants: Sequence[str], k: int) -> Claim:
    """The claim that the text makes of these variants, evaluated with `k` answers to a problem.

    >>> claim = parse("r3 < 0.7 grpo in tokens", ["grpo", "r3"], 4)
    >>> claim.ours, claim.theirs, claim.metric, claim.more, claim.factor
    ('r3', 'grpo', 'tokens', False, 0.7)
    """
    said = f"--claim {text!r}"
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{said}: write 'r3 > grpo', 'r3 > grpo in pass@{k}' or 'r3 < 0.7 grpo in tokens'")
    ours, sign, factor, theirs, metric = match.groups(default="")
    if strange := [name for name in (ours, theirs) if name not in variants]:
        raise ConfigError(f"{said}: {strange[0]} is none of the variants: {', '.join(variants)}")
    if ours == theirs:
        raise ConfigError(f"{said} compares {ours} with itself; name two variants")
    known = list(dict.fromkeys(["pass@1", f"pass@{k}", "tokens"]))
    if (metric := metric or "pass@1") not in known:
        raise ConfigError(f"{said}: no metric {metric!r}; there are {', '.join(known)} (pass@k of evaluate.samples)")
    if factor and metric != "tokens":
        raise ConfigError(f"{said}: a factor is for tokens; of {metric} say which is higher")
    return Claim(" ".join(text.split()), ours, theirs, metric, sign == ">", float(factor or 1))


def planned(claims: Sequence[str], known: Sequence[dict[str, Any]], *, before: bool) -> list[dict[str, Any]]:
    """A plan's claims followed by new ones; a claim that is there already stays unchanged."""
    claims_by_text = {claim["claim"]: claim for claim in known}
    for text in (" ".join(claim.split()) for claim in claims):
        claims_by_text.setdefault(text, {"claim": text, "before": before})
    return list(claims_by_text.values())
