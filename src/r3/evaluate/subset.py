"""The paper's challenging subset: the problems that the base model gets right at most once in 16 answers.

The answers that chose the subset must not be counted on it: they are its bad luck by construction, and the base model
would look worse than it is beside any other. `check_fresh` refuses to draw the very same answers again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from r3.errors import TaskError
from r3.evaluate.responses import read_judged
from r3.evaluate.results import by_problem


def hard_subset(eval_dir: Path, at_most: int = 1, samples: int | None = None) -> dict[str, list[str]]:
    """Ids, by task, of the problems that an earlier evaluation got right at most so often.

    All of its answers count, or with `samples` the first so many. Every problem must have the same number of them: one
    that was tried less often would pass for hard.
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
