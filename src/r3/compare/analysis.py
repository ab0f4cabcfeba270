"""From the raw files of a comparison to its numbers: curves on one grid, summaries per variant, tests between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r3.compare.records import Record, read_records
from r3.compare.statistics import (
    Array,
    PairedTest,
    TokenRatio,
    mean_interval,
    on_grid,
    paired_test,
    token_ratio,
    tokens_to_reach,
)
from r3.evaluate.passk import Estimate

EDGE = 0.1
"""How much of the budget counts as the start and as the end of training, for means over them."""


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over generated tokens: mean over seeds and its interval at each point."""

    tokens: Sequence[float]
    points: Sequence[Estimate]


class Comparison:
    """A comparison's finished cells on fresh seeds, on which no setting was chosen: claims are made from these.

    The other seeds form a comparison of their own, `looked_at`. If there are no fresh seeds, this one holds those and
    is `exploratory`: its numbers are reported, but no claim is made from them.
    """

    def __init__(self, plan: dict[str, Any], records: Sequence[Record]) -> None:
        looked_at = set(plan.get("looked_at", ()))
        fresh = [record for record in records if record.seed not in looked_at]
        self.exploratory = not fresh
        self.looked_at: Comparison | None = None
        if fresh and len(fresh) < len(records):
            self.looked_at = Comparison(plan, [record for record in records if record.seed in looked_at])
            records = fresh
        self.plan = {**plan, "seeds": [seed for seed in plan["seeds"] if (seed in looked_at) == self.exploratory]}
        plan = self.plan
        self.records = {
            name: sorted((r for r in records if r.variant == name), key=lambda r: r.seed) for name in plan["variants"]
        }
        self.names = [name for name, cells in self.records.items() if cells]
        self.missing = [
            (name, seed)
            for name, cells in self.records.items()
            for seed in plan["seeds"]
            if seed not in {cell.seed for cell in cells}
        ]
        self.k = records[0].k
        self.problems = records[0].problems
        self.by_problem = {len(e.get("right", ())) for record in records for e in record.evaluations} == {self.problems}
        """Whether every cell has the results of each held-out problem, so that intervals are over problems too."""
        self.level: float | None = plan.get("level")
        self.baseline: str = plan["baseline"] if plan["baseline"] in self.names else self.names[0]
        every = -(-plan["tokens"] // plan["evaluations"])
        self.grid = [min(place * every, plan["tokens"]) for place in range(plan["evaluations"] + 1)]

    @classmethod
    def read(cls, source: Path) -> Comparison:
        """Load the --out of an `r3 compare`, or its condensed file."""
        return cls(*read_records(source))

    def label(self, name: str) -> str:
        """A variant's name in tables and figures, with a warning where it masks truncated answers."""
        return f"{name.removesuffix('-masked')} (truncated masked)" if self.masked(name) else name

    def masked(self, name: str) -> bool:
        """Whether truncated answers are masked out of its loss, so that it does not learn to stop."""
        return bool(self.plan["variants"][name].get("method", {}).get("mask_truncated", False))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Generated tokens at each evaluation."""
        return ("pass@1",) if self.k == 1 else ("pass@1", f"pass@{self.k}")

    def seeds(self, name: str) -> list[int]:
        return [record.seed for record in self.records[name]]

    def curves(self, name: str, metric: str, seeds: Sequence[int] | None = None) -> Array:
        """Held-out curves on the grid, one per problem or one for all. [seeds, problems or 1, grid]"""
        chosen = [r for r in self.records[name] if seeds is None or r.seed in seeds]
        return np.array([
            [on_grid([e["tokens"] for e in r.evaluations], values, self.grid) for values in self._values(r, metric)]
            for r in chosen
        ])  # fmt: skip

    def _values(self, record: Record, metric: str) -> Array:
        """The metric at each evaluation. [problems or 1, evaluations]"""
        if not self.by_problem:
            return np.array([[e[metric] for e in record.evaluations]])
        right = np.array([e["right"] for e in record.evaluations]).T
        return right / self.k if metric == "pass@1" else (right > 0).astype(float)  # pass@k of k answers: any is right

    def band(self, name: str, metric: str) -> Band:
        """The mean curve of a held-out metric."""
        curves = self.curves(name, metric)
        return Band(self.grid, [_share(curves[:, :, place]) for place in range(len(self.grid))])

    def training_band(self, name: str, series: str) -> Band:
        """The mean curve of a training metric (solve_none, entropy, …), where any seed has a value."""
        records, mean = self.records[name], mean_interval if series == "entropy" else _share
        columns = zip(*(record.training[series] for record in records), strict=True)
        points = [
            (tokens, mean([value for value in column if value is not None]))
            for tokens, column in zip(records[0].training["tokens"], columns, strict=True)
            if any(value is not None for value in column)
        ]
        return Band([float(tokens) for tokens, _ in points if tokens is not None], [value for _, value in points])

    def start(self, name: str, metric: str) -> Estimate:
        return _share(self.curves(name, metric)[:, :, 0])

    def final(self, name: str, metric: str) -> Estimate:
        """The value exactly at the budget, interpolated where the last step went over it."""
        return _share(self.curves(name, metric)[:, :, -1])

    def best(self, name: str, metric: str) -> Estimate:
        """The mean of each seed's best evaluation, which is biased upwards: it is the best of many."""
        return _share([max(e[metric] for e in record.evaluations) for record in self.records[name]])

    def edge(self, name: str, series: str, *, last: bool) -> Estimate:
        """Mean over the first or the last tenth of training."""
        values = [_edge_mean(record.training[series], last=last) for record in self.records[name]]
        return mean_interval(values) if series == "entropy" else _share(values)

    def total(self, name: str, key: str) -> float:
        """Mean over seeds of a cell's total."""
        return float(np.mean([record.totals[key] for record in self.records[name]]))

    def shared_seeds(self, one: str, other: str) -> list[int]:
        return sorted(set(self.seeds(one)) & set(self.seeds(other)))

    def token_ratio(self, name: str, baseline: str, metric: str = "pass@1") -> TokenRatio:
        """Tokens to the baseline's final accuracy, over the seeds that both have."""
        seeds = self.shared_seeds(name, baseline)
        ours, theirs = (self.curves(which, metric, seeds) for which in (name, baseline))
        return token_ratio(self.grid, ours, theirs)

    def tokens_to(self, name: str, level: float) -> float:
        """Tokens at which the mean curve over seeds first has this pass@1; infinity if it never does."""
        return tokens_to_reach(self.grid, self.curves(name, "pass@1").mean(axis=(0, 1)), level)

    def test(self, name: str, other: str, metric: str) -> PairedTest:
        """Difference of the final values, seed by seed."""
        seeds = self.shared_seeds(name, other)
        ours, theirs = (self.curves(which, metric, seeds)[:, :, -1] for which in (name, other))
        return paired_test(ours, theirs)

    def references(self) -> list[str]:
        """What tokens are measured against: the baseline, and DAPO where it is another."""
        return [self.baseline, *(name for name in ("dapo",) if name in self.names and name != self.baseline)]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Which variants are tested against which: all against the baseline, and R³ against all others."""
        for name in self.names:
            if name != self.baseline:
                yield name, self.baseline
        if "r3" in self.names and self.baseline != "r3":
            for name in self.names:
                if name not in ("r3", self.baseline):
                    yield "r3", name

    def as_dict(self) -> dict[str, Any]:
        """The report's numbers, for other programs."""
        looked_at = {} if self.looked_at is None else {"looked_at": self.looked_at.as_dict()["variants"]}
        return {
            "exploratory": self.exploratory,
            "by_problem": self.by_problem,
            "variants": self._numbers(),
            **looked_at,
        }

    def _numbers(self) -> dict[str, Any]:
        return {
            name: {
                "seeds": self.seeds(name),
                **{
                    metric: {
                        "start": self.start(name, metric).as_dict(),
                        "final": self.final(name, metric).as_dict(),
                        "best": self.best(name, metric).as_dict(),
                    }
                    for metric in self.metrics
                },
                "token_ratio": {
                    reference: self.token_ratio(name, reference).ratio.as_dict()
                    for reference in self.references()
                    if reference != name and self.shared_seeds(name, reference)
                },
                "solve_none": [self.edge(name, "solve_none", last=last).as_dict() for last in (False, True)],
            }
            for name in self.names
        }


def _share(values: Sequence[float] | Array) -> Estimate:
    """Mean of shares, with its interval cut to [0, 1]."""
    mean = mean_interval(values)
    if math.isnan(mean.low):
        return mean
    return Estimate(mean.value, max(0.0, mean.low), min(1.0, mean.high))


def _edge_mean(values: Sequence[float | None], *, last: bool) -> float:
    """Over the first or last tenth of the bins, or the nearest bin that has a value."""
    known = [value for value in values if value is not None]
    if not known:
        return math.nan
    count = max(1, round(EDGE * len(values)))
    part = known[-count:] if last else known[:count]
    return float(np.mean(part))
