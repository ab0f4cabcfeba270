"""How a problem is put to the model: as text or as a chat, with a system prompt, a template and an instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from r3.errors import TaskError
from r3.samples import Message, PromptText, Query

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_SLOT = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class Prompting:
    """What is made of a question: template around it, instruction behind it, system prompt before it."""

    chat: bool = True
    """As a user's turn for the chat template; else as plain text."""
    instruction: str = INSTRUCTION
    system: str = ""
    template: str = ""
    chat_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template and "question" not in {slot[1] for slot in _SLOT.finditer(self.template)}:
            raise TaskError(
                "task.template has no {question}, so nothing would be asked; write it where the question goes (another "
                "column is the question by task.question_column)"
            )

    def query(
        self, id: str, question: str | Sequence[Message], answer: str, columns: Mapping[str, Any] | None = None
    ) -> Query:
        """The query that a question is, or the turns of a chat that ends in one."""
        columns = columns or {}
        prompt = self.prompt(question, columns)
        return Query(id, prompt, answer, columns, instruction=self.instruction, chat_options=self.chat_options)

    def prompt(self, question: str | Sequence[Message], columns: Mapping[str, Any] | None = None) -> PromptText:
        if isinstance(question, str):
            asked = self._asked(question, columns or {})
            if not self.chat:
                return asked
            turns: Sequence[Message] = (Message("user", asked),)
        else:
            if not self.chat:
                raise TaskError("the question is a chat: set task.chat=true, or give it as text")
            last = max(i for i, turn in enumerate(question) if turn.role == "user")
            asked = self._asked(question[last].content, columns or {})
            turns = (*question[:last], replace(question[last], content=asked), *question[last + 1 :])
        has_system = any(turn.role == "system" for turn in turns)
        return tuple(turns) if has_system or not self.system else (Message("system", self.system), *turns)

    def _asked(self, question: str, columns: Mapping[str, Any]) -> str:
        filled = filled_in(self.template, {**columns, "question": question}) if self.template else question
        return f"{filled}\n\n{self.instruction}" if self.instruction else filled


def filled_in(template: str, columns: Mapping[str, Any]) -> str:
    r"""The template with every {name} replaced by that column; {{ and }} stand for braces.

    >>> filled_in(r"{question} Put it in \boxed{}, not in {{x}}.", {"question": "What is {y}?"})
    'What is {y}? Put it in \\boxed{}, not in {x}.'
    """

    def value(slot: re.Match[str]) -> str:
        name = slot[1]
        if name is None:
            return slot[0][0]
        if name not in columns:
            raise TaskError(
                f"task.template asks for {{{name}}}, and there are {', '.join(columns)}; write {{{{{name}}}}} for the "
                "braces themselves"
            )
        if not isinstance(columns[name], str | int | float):  # its Python spelling would be put to the model
            kind = "nothing" if columns[name] is None else f"a {type(columns[name]).__name__}"
            raise TaskError(f"task.template asks for {{{name}}}, and that column holds {kind} here; write it as text")
        return str(columns[name])

    return _SLOT.sub(value, template)


def conversation(turns: Sequence[Any], where: str) -> tuple[Message, ...]:
    """The turns of a chat in a column of messages."""
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise TaskError(f"{where}: a list, but not of messages; a message is {{'role': 'user', 'content': '…'}}")
        if not isinstance(turn.get("content"), str):
            raise TaskError(f"{where}: a message whose content is a {type(turn.get('content')).__name__}, not a text")
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    if not messages or messages[-1].role != "user":
        raise TaskError(f"{where}: a chat must end with a user's turn, which the model is to answer")
    return messages


def question_of(turns: Sequence[Message]) -> str:
    """The text of a chat's last turn."""
    return turns[-1].content
