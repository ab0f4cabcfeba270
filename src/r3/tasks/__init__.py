"""Tasks: where queries come from, and who says whether an answer is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from r3.errors import TaskError
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
        from r3.tasks.graded import GradedArithmeticTask

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
        from r3.tasks.code_tiny import TinyCodeTask

        return TinyCodeTask(settings, seed)
    raise TypeError(f"no task has settings of type {type(settings).__name__}")
