"""Tasks: where queries come from, and who says whether an answer is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from r3.tasks.base import Task, Verdict

if TYPE_CHECKING:
    from r3.samples import Query
    from r3.tasks.settings import TaskSettings

__all__ = ["Task", "Verdict", "load_task"]


def load_task(settings: TaskSettings, seed: int, length: Callable[[Query], int] | None = None) -> Task:
    """The task that the settings name; `length` counts a prompt's tokens, for task.max_prompt_tokens."""
    if settings.name == "arithmetic":
        from r3.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(settings, seed)
    if settings.name == "graded-arithmetic":
        from r3.tasks.graded import GradedArithmeticTask

        return GradedArithmeticTask(settings, seed)
    if settings.name == "reasoning-gym":
        from r3.tasks.gym import ReasoningGymTask

        return ReasoningGymTask(settings, seed)
    from r3.tasks.files import FileTask

    return FileTask(settings, length)
