"""Tasks: where queries come from, and who says whether an answer is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r3.tasks.base import Task, Verdict

if TYPE_CHECKING:
    from r3.config import TaskSettings

__all__ = ["Task", "Verdict", "load_task"]


def load_task(settings: TaskSettings, seed: int) -> Task:
    """The task that the settings name."""
    if settings.name == "arithmetic":
        from r3.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(settings, seed)
    from r3.tasks.files import FileTask

    return FileTask(settings)
