"""Whether a task has the data that a method asks for, and whether the prompts that a method builds fit the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from r3.config import Config
from r3.errors import ConfigError, TaskError
from r3.samples import Query
from r3.tasks import Task

log = logging.getLogger(__name__)

BUILT = {
    "reflection": "reflection prompts are shortened to fit",
    "distill": "the teacher's prompts are shortened to fit",
    "hint": "a hinted prompt that is longer is not asked",
    "critique": "the shown failure is shortened to fit",
}
"""Sections of the method that build prompts of their own within a budget, and what becomes of longer ones."""


def check_room(config: Config, max_context: int | None) -> None:
    """The prompts that a method builds fit the model's context with the response."""
    if max_context is None:
        return
    for name, fate in BUILT.items():
        section, room = getattr(config.method, name), config.rollout.max_tokens
        if section.enabled and section.max_prompt_tokens + room > max_context:
            raise ConfigError(
                f"method.{name}.max_prompt_tokens={section.max_prompt_tokens} and rollout.max_tokens={room} exceed the "
                f"model's context of {max_context}; lower one ({fate})"
            )


def check_demonstrations(
    config: Config, task: Task, tokenizer: Any, longest_prompt: int, max_context: int | None
) -> None:
    """Demonstrations can end, and some of them are short enough to join."""
    settings = config.settled().method.demonstration
    if not settings.enabled or settings.max_tokens is None:
        return
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ConfigError(
            f"model.path={config.model.path}: demonstrations end with an end-of-text token, and its tokenizer names "
            "none; set eos_token in tokenizer_config.json"
        )
    if max_context is not None and longest_prompt + settings.max_tokens > max_context:
        raise ConfigError(
            f"method.demonstration.max_tokens={settings.max_tokens} behind a prompt of {longest_prompt} tokens exceeds "
            f"the model's context of {max_context}; lower it"
        )
    given = [query.demonstration for query in task.train if query.demonstration]
    long = sum(len(tokenizer.encode(text, add_special_tokens=False)) >= settings.max_tokens for text in given)
    if long == len(given):
        raise ConfigError(
            f"method.demonstration=on: each of the {long} demonstrations is longer than {settings.max_tokens} tokens; "
            "raise method.demonstration.max_tokens (by default rollout.max_tokens)"
        )
    if long:
        log.warning(
            "method.demonstration=on: %d of %d demonstrations are longer than %d tokens and do not join",
            *(long, len(given), settings.max_tokens),
        )


def check_help(config: Config, task: Task) -> None:
    """The training queries have what the method shows or trains on beside them, or some of them at least."""
    for name, said, missing, fix in _wanted(config, task):
        if missing == len(task.train):
            raise TaskError(
                f"method.{name}=on needs {said}, and no training query of task {config.task.name!r} has any: {fix}"
            )
        if missing:
            log.warning(
                "method.%s=on: %d of %d training queries have no %s; they are trained on as without it",
                name,
                missing,
                len(task.train),
                said,
            )


def _wanted(config: Config, task: Task) -> Iterator[tuple[str, str, int, str]]:
    """What the method asks for: its section, what that is, how many queries lack it, and the fix."""
    method = config.method
    if method.demonstration.enabled:
        yield _column(task, "demonstration", "demonstration", [bool(query.demonstration) for query in task.train])
    if method.hint.enabled:
        yield _column(task, "hint", "hint", [bool(query.hints) for query in task.train])
    if method.critique.enabled and method.critique.feedback == "column":
        yield _column(task, "critique", "feedback", [bool(query.feedback.strip()) for query in task.train])
    if method.critique.enabled and method.critique.feedback == "gold":
        fix = "set method.critique.feedback=verdict, or column with task.feedback_column"
        yield "critique", "gold answers", sum(not _has_gold(query) for query in task.train), fix


def _has_gold(query: Query) -> bool:
    return bool(query.answer.strip())


def _column(task: Task, section: str, column: str, has: list[bool]) -> tuple[str, str, int, str]:
    said = "feedback" if column == "feedback" else f"{column}s"
    return section, said, has.count(False), f"name the column of a file with task.{column}_column"
