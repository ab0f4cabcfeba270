"""Tasks: where queries come from, and who says whether an answer is right.

`load_problems` gives the problems of a run: all of the task's, or those that another run solved neither too seldom nor
too often. A problem that is never solved teaches nothing and has nothing to replay; one that is always solved is known.
With `task.pass_rates_from` a run of `r3 train` on the same problems (one step with large groups is enough) says which
are which for the model at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from r3.buffer import SampleBuffer
from r3.errors import ConfigError, TaskError
from r3.run import RunFiles
from r3.samples import Query
from r3.tasks.given import function_of
from r3.tasks.settings import (
    ArithmeticSettings,
    CodeSettings,
    FileSettings,
    GradedArithmeticSettings,
    ReasoningGymSettings,
    TaskSettings,
    TinyCodeSettings,
)
from r3.tasks.task import ChosenTask, Task
from r3.verify import Reward, RewardsJudge, VerifierError
from r3.verify.functions import importable

if TYPE_CHECKING:
    from r3.samples import Query


__all__ = ["Task", "load_task", "rewarded"]


def load_task(
    settings: TaskSettings,
    seed: int,
    length: Callable[[Query], int] | None = None,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Task:
    """The task that the settings name.

    `length` counts a prompt's tokens, for task.max_prompt_tokens; `functions` are rewards that were given as objects.
    """
    importable([*settings.functions_in, Path.cwd()])
    task = _family(settings, seed, length)
    if not settings.rewards:
        return task
    rewards = [
        Reward(function_of(reward, functions), reward.called, reward.weight, reward.truncated, reward.caged)
        for reward in settings.rewards
    ]
    return rewarded(task, rewards, outcome=settings.outcome, right_above=settings.right_above)


def rewarded(task: Task, rewards: Sequence[Reward], *, outcome: str | None = None, right_above: float = 0.5) -> Task:
    """The task under rewards of the user's own, in place of the method's."""
    try:
        judge = RewardsJudge(rewards, correct=task.judge, outcome=outcome, right_above=right_above)
    except VerifierError as error:
        raise TaskError(str(error)) from error
    return ChosenTask.of(task, judge=judge)


def _family(settings: TaskSettings, seed: int, length: Callable[[Query], int] | None) -> Task:
    if isinstance(settings, ArithmeticSettings):
        from r3.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(settings, seed)
    if isinstance(settings, GradedArithmeticSettings):
        from r3.tasks.arithmetic import GradedArithmeticTask

        return GradedArithmeticTask(settings, seed)
    if isinstance(settings, ReasoningGymSettings):
        from r3.tasks.gym import ReasoningGymTask

        return ReasoningGymTask(settings, seed)
    if isinstance(settings, FileSettings):
        from r3.tasks.files import FileTask

        return FileTask(settings, length)
    if isinstance(settings, CodeSettings):
        from r3.tasks.code import CodeTask

        return CodeTask(settings, length)
    if isinstance(settings, TinyCodeSettings):
        from r3.tasks.code import TinyCodeTask

        return TinyCodeTask(settings, seed)
    raise TypeError(f"no task has settings of type {type(settings).__name__}")


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
