"""One line of `metrics.jsonl`: what a step did, in plain numbers.

All but the names under `seconds/`, `tokens_per_second` and `memory/` is the same in every run with the same seed.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from r3.method.mixed import Origin, StepResult
from r3.method.ranking import pairs_of_groups
from r3.method.settings import RankingSettings
from r3.policy.update import UpdateReport
from r3.samples import Sample
from r3.tasks.settings import TaskSettings
from r3.verify.rewards import OutcomeWatch

ORIGINS: tuple[Origin, ...] = get_args(Origin)
FAILURES = ("timeout", "memory", "crashed", "error")
"""Verdicts that are failures of the verifier, not of the answer."""


MOST_FAILURES = 0.01
"""Warn if the verifier fails on more than this share of a step's answers."""


def alarms(metrics: Mapping[str, float], answers: int) -> list[str]:
    """Warnings about a step: answers that count as wrong although nobody judged them wrong.

    >>> alarms({"verify/timeout": 2}, 300)
    []
    >>> alarms({"verify/timeout": 4}, 300)[0][:64]
    'the verifier gave up on 4 of 300 answers (timeout), which count '
    """
    return [
        f"the verifier gave up on {count:.0f} of {answers} answers ({reason}), which count as wrong: "
        "if the machine is not overloaded, see docs/verifier.md"
        for reason in FAILURES
        if (count := metrics.get(f"verify/{reason}", 0)) > MOST_FAILURES * answers
    ]


class NeverRight:
    """Warns once if the user's function that says right or wrong never says right, though answers differ in worth."""

    def __init__(self, task: TaskSettings) -> None:
        decides = task.decides
        scored = decides is not None and decides.function != "correct" and decides.weight != 0
        self._decides = decides if scored else None
        name = "" if decides is None else decides.called
        self._watch = OutcomeWatch(name, task.right_above, threshold="task.right_above", outcome="task.outcome")

    def alarms(self, result: StepResult) -> list[str]:
        """The warning, in the step where it is time."""
        decides = self._decides
        if decides is None:
            return []
        scored = [sample for sample in result.samples if decides.called in sample.reward_parts]
        warning = self._watch.see(
            [sample.reward_parts[decides.called] / decides.weight for sample in scored],
            [sample.reward for sample in scored],
            [bool(sample.outcome) for sample in scored],
        )
        return [] if warning is None else [warning]


def step_metrics(
    result: StepResult,
    report: UpdateReport,
    seconds: Mapping[str, float],
    reflections: Mapping[str, int],
    failed: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """All metrics of a step; `failed` counts the answers on which a reward function failed in its cage, by its name."""
    fresh = result.samples
    plain = [s for s in fresh if s.context.kind == "plain"]
    reflected = [s for s in fresh if s.context.kind == "reflection"]
    counts = result.counts
    groups = max(1.0, counts["groups/plain"])
    tokens = sum(len(s) for s in fresh)
    return {
        "accuracy": _mean(s.outcome for s in plain),
        "accuracy/reflection": _mean(s.outcome for s in reflected),
        **_lift(plain, reflected),
        **_successes(result),
        "reward": _mean(s.reward for s in fresh),
        **{f"reward/{part}": _mean(s.reward_parts.get(part, 0.0) for s in fresh) for part in _parts(fresh)},
        **{f"reward/{name}/failed": count for name, count in sorted((failed or {}).items())},
        "solve_none": counts["groups/solve_none"] / groups,
        "solve_all": counts["groups/solve_all"] / groups,
        "truncated": _mean(s.truncated for s in fresh),
        "entropy": _mean_entropy(fresh),
        "length/mean": _mean(len(s) for s in fresh),
        "length/max": max((len(s) for s in fresh), default=0),
        **{f"verify/{reason}": sum(s.reason == reason for s in fresh) for reason in FAILURES},
        "tokens/generated": tokens,
        "tokens/trained": report.tokens,
        **counts,
        **{f"reflection/{reason}": count for reason, count in sorted(reflections.items())},
        "update/count": report.updates,
        "update/skipped": report.skipped,
        "update/loss": _mean(report.losses),
        "update/grad_norm": _mean(report.grad_norms),
        "update/learning_rate": report.learning_rate,
        "update/entropy": report.entropy,
        "update/microbatches": report.microbatches,
        **{f"update/{name}": value for name, value in report.diagnostics.items()},
        **{f"seconds/{stage}": value for stage, value in seconds.items()},
        "tokens_per_second": tokens / max(1e-9, seconds["step"]),
        "memory/peak_gb": peak_memory_gb(),
    }


def _lift(plain: Sequence[Sample], reflected: Sequence[Sample]) -> dict[str, float]:
    """What a shown failure adds: right answers per token, and plain answers to the queries that were reflected on."""
    asked_twice = {sample.query_id for sample in reflected}
    same = [sample for sample in plain if sample.query_id in asked_twice]
    return {
        "lift/plain": _mean(sample.outcome for sample in same),
        **_tried("plain", same),
        **_tried("reflection", reflected),
        "lift/right_per_1k_tokens/plain": _right_per_1k(same),
        "lift/right_per_1k_tokens/reflection": _right_per_1k(reflected),
        "tokens/reflection": sum(map(len, reflected)),
    }


def _tried(kind: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Counts to be summed over steps, since one step has few: a mean of their shares would weigh empty steps."""
    return {f"lift/tried/{kind}": len(samples), f"lift/right/{kind}": sum(bool(sample.outcome) for sample in samples)}


def _successes(result: StepResult) -> dict[str, float]:
    """Where a step's right answers come from, and what those that were generated cost; replayed ones cost no token."""
    members = [member for mixed in result.groups for member in mixed.members]
    drawn = {origin: [m.sample for m in members if m.origin == origin] for origin in ORIGINS}
    return {
        **{f"successes/{origin}": sum(bool(s.outcome) for s in samples) for origin, samples in drawn.items()},
        "yield/plain": _right_per_1k(drawn["fresh"]),
        "yield/reflection": _right_per_1k(drawn["reflection"]),
    }


def ranking_metrics(result: StepResult, limit: int, settings: RankingSettings) -> dict[str, float]:
    """Whether SERR's order at half the length limit tells which of a query's answers finish right (AUC; 0.5: no).

    A step has few such pairs: sum `ranking/pairs_in_order` and `ranking/pairs` over many before believing it.
    """
    groups = pairs_of_groups((m.group for m in result.groups), limit=limit, peak_fraction=settings.peak_fraction)
    in_order, pairs = sum(ordered for ordered, _ in groups), sum(of for _, of in groups)
    auc = in_order / pairs if pairs else float("nan")
    return {"ranking/auc": auc, "ranking/pairs_in_order": in_order, "ranking/pairs": pairs}


def _right_per_1k(samples: Sequence[Sample]) -> float:
    tokens = sum(map(len, samples))
    return 1000 * sum(bool(sample.outcome) for sample in samples) / tokens if tokens else float("nan")


def _parts(samples: Sequence[Sample]) -> list[str]:
    return sorted({"ranking"} | {part for s in samples for part in s.reward_parts})


def _mean(values: Iterable[float | bool | None]) -> float:
    numbers = [float(value) for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else float("nan")


def _mean_entropy(samples: Sequence[Sample]) -> float:
    known = [s.entropies for s in samples if s.entropies is not None]
    return float(np.concatenate(known).mean(dtype=np.float64)) if known else float("nan")


def peak_memory_gb() -> float:
    """Peak memory: of the card if there is one, else of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 1e9
    # Linux hands the peak of getrusage on to whoever a large process starts; that of /proc is this process's own.
    status = Path("/proc/self/status")
    peaks = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else []
    if peaks:
        return int(peaks[0]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
