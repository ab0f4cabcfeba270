"""Rewards given as objects, in a script or a notebook, as the settings of a recipe.

A function that a module holds is named by its dotted path: other processes and a resume find it. Any other (of a
script or a notebook, a closure, an object that can be called) is in this process alone: the recipe keeps its name.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3.errors import ConfigError, TaskError
from r3.tasks.settings import GIVEN, RewardFunction

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
