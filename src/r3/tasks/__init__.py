"""Tasks: where queries come from, and who says whether an answer is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from r3.tasks.base import Task, Verdict
from r3.tasks.settings import (
    ArithmeticSettings,
    CodeSettings,
    FileSettings,
    GradedArithmeticSettings,
    ReasoningGymSettings,
    TaskSettings,
    TinyCodeSettings,
)

if TYPE_CHECKING:
    from r3.samples import Query

__all__ = ["Task", "Verdict", "load_task"]


def load_task(settings: TaskSettings, seed: int, length: Callable[[Query], int] | None = None) -> Task:
    """The task that the settings name; `length` counts a prompt's tokens, for task.max_prompt_tokens."""
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
