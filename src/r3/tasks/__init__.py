"""Tasks: where queries come from, and who says whether an answer is right.

`load_problems` gives the problems of a run: all of the task's, or those that another run solved neither too seldom nor
too often. A problem that is never solved teaches nothing and has nothing to replay; one that is always solved is known.
With `task.pass_rates_from` a run of `r3 train` on the same problems (one step with large groups is enough) says which
are which for the model at hand.

Rewards given as objects, in a script or a notebook, as the settings of a recipe.

A function that a module holds is named by its dotted path: other processes and a resume find it. Any other (of a
script or a notebook, a closure, an object that can be called) is in this process alone: the recipe keeps its name.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from r3.buffer import SampleBuffer
from r3.errors import ConfigError, TaskError
from r3.run import RunFiles
from r3.samples import Query
from r3.tasks.settings import (
    GIVEN,
    ArithmeticSettings,
    CodeSettings,
    FileSettings,
    GradedArithmeticSettings,
    ReasoningGymSettings,
    RewardFunction,
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


# ----------------------------------------------------- rewards given as objects


AnyReward = str | Callable[..., Any] | tuple[str | Callable[..., Any], float] | Mapping[str, Any]
"""A function (or its dotted path), a pair of it and its weight, or a mapping with the keys of a recipe."""


@dataclass(frozen=True, slots=True)
class GivenRewards:
    """Rewards as a recipe says them, and what it cannot say."""

    settings: list[dict[str, Any]] = field(default_factory=list)
    """For task.rewards."""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Those that no module holds, by name."""
    folders: list[str] = field(default_factory=list)
    """Where the modules of the others lie, besides the current folder and what is installed."""


def given_rewards(rewards: Sequence[AnyReward] | AnyReward) -> GivenRewards:
    """What `r3.train(rewards=…)` was given."""
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str) and not _is_pair(rewards)
    given = GivenRewards()
    for number, reward in enumerate(rewards if several else [rewards], 1):  # type: ignore[arg-type]  # told apart above
        settings = _settings_of(reward, number)
        function = settings["function"]
        if not isinstance(function, str):
            path = _dotted_path(function)
            settings |= {"function": path or GIVEN, "name": settings.get("name") or _name_of(function)}
            if path is None:
                given.functions[settings["name"]] = function
            elif (folder := _folder_of(path)) is not None and folder not in given.folders:
                given.folders.append(folder)
        given.settings.append(settings)
    return given


def function_of(setting: RewardFunction, given: Mapping[str, Callable[..., Any]]) -> str | Callable[..., Any]:
    """The function that the settings name, or the object that this process was given for it."""
    if setting.function != GIVEN:
        return setting.function
    if setting.called not in given:
        raise TaskError(
            f"task.rewards: {setting.called!r} was given to r3.train as an object that no module holds, so it cannot "
            "be found again: give the rewards once more (r3.train(resume=…, rewards=[…]), r3.Run(…, rewards=[…])), or "
            "judge by a function in a module (r3 eval --judge module.function)"
        )
    return given[setting.called]


def _is_pair(rewards: Any) -> bool:
    """Whether it is one function with its weight."""
    return isinstance(rewards, tuple) and len(rewards) == 2 and isinstance(rewards[1], int | float)


def _settings_of(reward: Any, number: int) -> dict[str, Any]:
    if isinstance(reward, str) or (callable(reward) and not isinstance(reward, type)):
        return {"function": reward}
    if _is_pair(reward) and (isinstance(reward[0], str) or callable(reward[0])):
        return {"function": reward[0], "weight": float(reward[1])}
    if isinstance(reward, Mapping) and "function" in reward:
        return dict(reward)
    raise ConfigError(
        f"rewards, number {number}: {reward!r} is no reward; give a function, (function, weight), or a mapping with "
        "the keys function, name, weight, truncated, caged"
    )


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ConfigError("rewards: a lambda has no name to log it by; write {'function': lambda …, 'name': 'short'}")
    return str(name)


def _dotted_path(function: Any) -> str | None:
    """The path under which any process can import this very object, if there is one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        return None
    try:
        importable = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: a module made by hand
        return None
    return f"{module}.{name}" if importable else None


def _folder_of(path: str) -> str | None:
    """The folder from which the function's module is imported, if that is neither the current one nor Python's own."""
    module = sys.modules[path.partition(".")[0]]
    files = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
    first = Path(files[-1]).resolve()
    folder = first.parent
    if folder == Path.cwd() or folder.is_relative_to(Path(sys.prefix).resolve()):
        return None
    return str(folder)
