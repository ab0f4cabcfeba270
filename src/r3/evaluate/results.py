"""From verdicts to the paper's table: one row per model, one column per benchmark, and the mean over benchmarks.

The paper's challenging subset (`hard_subset`) has the problems that the base model gets right at most once in 16
answers. The answers that chose the subset must not be counted on it: they are its bad luck by construction, and the
base model would look worse than it is beside any other. `check_fresh` refuses to draw the very same answers again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3.errors import TaskError
from r3.evaluate.passk import Estimate, estimate, majority, pass_at_k
from r3.evaluate.responses import Judged, read_judged
from r3.run.disk import write_atomically

Problems = Sequence[Sequence[Judged]]
"""The answers to each problem of a benchmark."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one benchmark says."""

    title: str
    problems: int
    missing: int
    """Problems that nobody answered: they count neither as right nor as wrong."""
    samples: int
    """Answers to the problem that has fewest."""
    pass_at: Mapping[int, Estimate]
    majority: Estimate
    mean_tokens: float | None
    truncated: float
    reasons: Mapping[str, int]
    """How often the judge gave which reason."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What each of several reward functions gave, weighted: the mean by name."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "problems": self.problems,
            "missing": self.missing,
            "samples": self.samples,
            "pass@k": {str(k): found.as_dict() for k, found in self.pass_at.items()},
            "majority": self.majority.as_dict(),
            "mean_tokens": self.mean_tokens,
            "truncated": self.truncated,
            "reasons": dict(self.reasons),
            **({"rewards": dict(self.rewards)} if self.rewards else {}),
        }


@dataclass(frozen=True, slots=True)
class Results:
    """What an evaluation found, and how it was made."""

    model: str
    about: Mapping[str, Any]
    tasks: Mapping[str, TaskResult]
    mean: Estimate
    """The mean of pass@1 over the benchmarks, each with the same weight."""
    answers: Mapping[str, Problems]
    """The verdicts that all this was computed from."""

    def as_dict(self) -> dict[str, Any]:
        tasks = {name: task.as_dict() for name, task in self.tasks.items()}
        return {"model": self.model, "about": dict(self.about), "tasks": tasks, "mean": {"pass@1": self.mean.as_dict()}}


def by_problem(
    judged: Iterable[Judged], tasks: Mapping[str, Sequence[str]], samples: int | None = None
) -> dict[str, Problems]:
    """The answers to each problem id of each task, in order; problems without any are left out.

    With `samples`, only that many of the first: a longer evaluation can be looked at as a shorter one.
    """
    answers: dict[tuple[str, str], list[Judged]] = {}
    for one in judged:
        if samples is None or one.sample < samples:
            answers.setdefault((one.task, one.id), []).append(one)
    return {
        task: [sorted(answers[task, i], key=lambda one: one.sample) for i in ids if (task, i) in answers]
        for task, ids in tasks.items()
    }


def pass_scores(problems: Problems, k: int, limit: int | None = None) -> list[float]:
    """pass@k of each problem; with a limit, answers longer than that many tokens count as cut off, so as wrong."""
    fewest = min(map(len, problems))
    if not 1 <= k <= fewest:
        raise TaskError(
            f"pass@{k} needs k from 1 to the number of answers, and {problems[0][0].task} has a problem with {fewest}; "
            "change --k or draw more --samples"
        )
    return [pass_at_k(len(answers), sum(_right(one, limit) for one in answers), k) for answers in problems]


def _right(one: Judged, limit: int | None) -> bool:
    if limit is None:
        return one.right
    if one.tokens is None:
        raise TaskError(
            f"{one.task}: the answers to {one.id} come without their lengths, so limits on them cannot be tried; add a "
            "column 'tokens', or name the MODEL whose tokenizer can count them"
        )
    return one.right and one.tokens <= limit


def summarise(
    model: str,
    answers: Mapping[str, Problems],
    sizes: Mapping[str, int],
    titles: Mapping[str, str],
    *,
    ks: Sequence[int] = (),
    seed: int = 0,
    about: Mapping[str, Any],
) -> Results:
    """All numbers of an evaluation. Without `ks`: pass@1 and pass@n. The same answers give the same numbers."""
    for task, problems in answers.items():
        if not problems:
            raise TaskError(f"task {task}: no problem was answered; leave it out of --tasks")
    tasks = {task: _task_result(titles[task], problems, sizes[task], ks, seed) for task, problems in answers.items()}
    mean = estimate(*(pass_scores(problems, 1) for problems in answers.values()), seed=seed)
    return Results(model, about, tasks, mean, answers)


def _task_result(title: str, problems: Problems, size: int, ks: Sequence[int], seed: int) -> TaskResult:
    every = [one for answers in problems for one in answers]
    samples = min(map(len, problems))
    wanted = sorted({1, *(ks or (samples,))})
    tokens = [one.tokens for one in every if one.tokens is not None]
    votes = [majority([(None if one.truncated else one.answer, one.right) for one in answers]) for answers in problems]
    return TaskResult(
        title=title,
        problems=len(problems),
        missing=size - len(problems),
        samples=samples,
        pass_at={k: estimate(pass_scores(problems, k), seed=seed) for k in wanted},
        majority=estimate(votes, seed=seed),
        mean_tokens=math.fsum(tokens) / len(tokens) if tokens else None,
        truncated=sum(one.truncated for one in every) / len(every),
        reasons=dict(sorted(Counter(one.reason for one in every).items())),
        rewards=_mean_rewards(every),
    )


def _mean_rewards(every: Sequence[Judged]) -> dict[str, float]:
    """By name; a function that abstained from an answer gave it nothing."""
    names = sorted({name for one in every for name in one.scores or {}})
    return {name: math.fsum((one.scores or {}).get(name, 0.0) for one in every) / len(every) for name in names}


def write_results(results: Results, folder: Path) -> None:
    """`results.json` and `results.md`, each whole or not at all."""
    write_atomically(folder / "results.json", (json.dumps(results.as_dict(), indent=2) + "\n").encode())
    write_atomically(folder / "results.md", markdown(results).encode())


def markdown(results: Results) -> str:
    """The paper's table, then everything about each benchmark."""
    settings = ", ".join(f"{name} {value}" for name, value in results.about.items() if value not in (None, ""))
    return (
        f"{paper_table([results.as_dict()])}\n\n"
        "pass@1 in %, its 95 % interval over problems in brackets, mean tokens of a response in parentheses.\n\n"
        f"{details(results)}\n\n{settings}\n"
    )


def paper_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """A row for each evaluation, as its results.json has it; a benchmark that one of them lacks stays empty there."""
    titles = {name: task["title"] for found in evaluations for name, task in found["tasks"].items()}
    rows = [["model", *titles.values(), "mean"]]
    for found in evaluations:
        cells = [_cell(found["tasks"].get(name)) for name in titles]
        rows.append([found["model"], *cells, _percent(found["mean"]["pass@1"])])
    return aligned(rows)


def details(results: Results) -> str:
    """A row for each benchmark."""
    ks = sorted({k for task in results.tasks.values() for k in task.pass_at})
    rows = [["benchmark", "problems", "samples", *(f"pass@{k}" for k in ks), "majority", "tokens", "truncated"]]
    for task in results.tasks.values():
        shares = [_percent(task.pass_at[k].as_dict()) if k in task.pass_at else "" for k in ks]
        problems = f"{task.problems} of {task.problems + task.missing}" if task.missing else str(task.problems)
        cells = [task.title, problems, str(task.samples), *shares, _percent(task.majority.as_dict())]
        rows.append([*cells, _tokens(task.mean_tokens), f"{task.truncated:.1%}"])
    return aligned(rows) + _rewards(results)


def _rewards(results: Results) -> str:
    """A row for each benchmark that several reward functions judged, behind a blank line; or nothing."""
    names = sorted({name for task in results.tasks.values() for name in task.rewards})
    if not names:
        return ""
    head = ["benchmark", *(f"mean reward/{name}" for name in names)]
    rows = [
        [task.title, *(f"{task.rewards[name]:.3f}" if name in task.rewards else "" for name in names)]
        for task in results.tasks.values()
    ]
    return f"\n\n{aligned([head, *rows])}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up, so that it reads on a screen as well; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(task: Mapping[str, Any] | None) -> str:
    if task is None:
        return ""
    tokens = _tokens(task["mean_tokens"])
    return _percent(task["pass@k"]["1"]) + (f" ({tokens})" if tokens else "")


def _percent(found: Mapping[str, float]) -> str:
    return f"{100 * found['value']:.2f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _tokens(mean: float | None) -> str:
    return "" if mean is None else f"{mean:,.0f}"


# ------------------------------------------------------- the challenging subset


def hard_subset(eval_dir: Path, at_most: int = 1, samples: int | None = None) -> dict[str, list[str]]:
    """Ids, by task, of the problems that an earlier evaluation got right at most so often.

    All of its answers count, or with `samples` that many of the first. Every problem must have the same number of them:
    one that was tried less often would pass for hard.
    """
    judged = read_judged(eval_dir / "responses.jsonl")
    if not (eval_dir / "results.json").exists():
        raise TaskError(f"{eval_dir} is not finished: run that evaluation to its end first")
    ids: dict[str, list[str]] = {}
    for task, problem in sorted({(one.task, one.id) for one in judged}):
        ids.setdefault(task, []).append(problem)
    hard: dict[str, list[str]] = {}
    for task, problems in by_problem(judged, ids, samples).items():
        counts = {len(answers) for answers in problems}
        if len(counts) > 1 or (samples is not None and counts != {samples}):
            raise TaskError(
                f"{eval_dir} is not finished: from {min(counts)} to {max(counts)} answers to a problem of {task}; run "
                "that evaluation to its end first"
            )
        hard[task] = [answers[0].id for answers in problems if sum(one.right for one in answers) <= at_most]
    return hard


def check_fresh(eval_dir: Path, model: str, seed: int) -> None:
    """Refuse a model and seed that would draw the answers again that chose the subset."""
    try:
        before = json.loads((eval_dir / "about.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TaskError(f"{eval_dir}: about.json cannot be read ({error}); give the --out of an evaluation") from error
    if (before.get("model"), before.get("seed")) == (model, seed):
        raise TaskError(
            f"{model} with --seed {seed} chose the hard problems in {eval_dir}, and drawing the same answers again "
            f"would make it look worse than it is; add --seed {seed + 1}"
        )


def chosen(hard: dict[str, list[str]], tasks: Sequence[str], eval_dir: Path) -> dict[str, set[str]]:
    """The hard problems of the tasks asked for; each must have been in that evaluation and left some."""
    for task in tasks:
        if task not in hard:
            raise TaskError(
                f"{eval_dir} has no answers to {task}, only to {', '.join(hard) or 'nothing'}; evaluate the base model "
                "on it first, or leave it out of --tasks"
            )
        if not hard[task]:
            raise TaskError(f"{eval_dir} leaves no hard problem of {task}; leave it out of --tasks")
    return {task: set(hard[task]) for task in tasks}
