"""The problems of a run: all of the task's, or those that another run solved neither too seldom nor too often.

A problem that is never solved teaches nothing and has nothing to replay; one that is always solved is known. With
`task.pass_rates_from` a run of `r3 train` on the same problems (one step with large groups is enough) says which are
which for the model at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from r3.buffer import SampleBuffer
from r3.errors import ConfigError
from r3.run import RunFiles
from r3.samples import Query
from r3.tasks import Task, load_task
from r3.tasks.settings import TaskSettings
from r3.tasks.task import ChosenTask

log = logging.getLogger(__name__)


def load_problems(
    settings: TaskSettings,
    seed: int,
    length: Callable[[Query], int] | None = None,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Task:
    """The task, with the training problems that `task.pass_rates_from` leaves of it."""
    task = load_task(settings, seed, length, functions)
    if settings.pass_rates_from is None:
        return task
    run = RunFiles(settings.pass_rates_from.replace("{seed}", str(seed)))
    run.read_info()  # refuses what is no run
    with SampleBuffer.open_reader(run.buffer_path) as buffer:
        rates = buffer.success_rate([query.id for query in task.train], context="plain")
    fewest, most = settings.min_pass_rate, settings.max_pass_rate
    kept = tuple(query for query in task.train if fewest <= rates.get(query.id, -1.0) <= most)
    told = f"task.pass_rates_from={run.path}: {len(rates)} of {len(task.train)} training problems were tried there"
    if not kept:
        task.judge.close()
        raise ConfigError(
            f"{told}, none of them with a pass rate from {fewest:g} to {most:g}; widen the range, or name a run on the "
            "same task (name, split, size, seed)"
        )
    log.warning("%s; the %d with a pass rate from %g to %g are trained on", told, len(kept), fewest, most)
    return ChosenTask.of(task, train=kept)
