"""What a task is: training queries, held-out queries, and a judge.

Its problems are put to the model as text or as a chat, with a system prompt, a template and an instruction
(`Prompting`). A written solution gives a right answer in full, and hints that are more and more of its first steps
(`helped`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from r3.errors import TaskError
from r3.samples import Message, PromptText, Query
from r3.verify.judge import Judge


class Task(Protocol):
    """Where queries come from and which answers are right. Training and held-out queries are disjoint."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Sequence[Query]: ...

    @property
    def heldout(self) -> Sequence[Query]: ...

    @property
    def judge(self) -> Judge: ...


@dataclass(frozen=True, slots=True)
class ChosenTask:
    """A task of parts: some of another's problems, say, or another's problems under a judge of its own."""

    name: str
    train: Sequence[Query]
    heldout: Sequence[Query]
    judge: Judge

    @staticmethod
    def of(task: Task, *, train: Sequence[Query] | None = None, judge: Judge | None = None) -> ChosenTask:
        """The task, with other training problems or another judge."""
        return ChosenTask(task.name, task.train if train is None else train, task.heldout, judge or task.judge)


# ---------------------------------------------------------------------- prompts


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


# ------------------------------------------------------------ written solutions


LEVELS = 3
"""How many hints are made of a solution that has steps enough."""


def written(query: Query) -> str | None:
    r"""What a right answer looks like: the column `response` as it is, or `solution` with the answer in a box.

    >>> written(Query("q", "2+3?", "5", {"solution": "2 + 3 = 5"}))
    '2 + 3 = 5\n\\boxed{5}'
    """
    if query.columns.get("response"):
        return str(query.columns["response"])
    if not query.columns.get("solution"):
        return None
    solution = str(query.columns["solution"])
    return solution if "\\boxed{" in solution else f"{solution}\n\\boxed{{{query.answer}}}"


def first_steps(steps: Sequence[str], joint: str = "\n") -> tuple[str, ...]:
    """About a quarter of the steps, half and three quarters of them, each hint whole by itself; of few steps, fewer.

    >>> first_steps(["a", "b", "c", "d", "e"], "")
    ('ab', 'abc', 'abcd')
    >>> first_steps(["a", "b"], "")
    ('a', 'ab')
    """
    shown = dict.fromkeys(-(-level * len(steps) // (LEVELS + 1)) for level in range(1, LEVELS + 1))
    return tuple(joint.join(steps[:count]) for count in shown if count)


def helped(query: Query) -> Query:
    """The query with its written solution as demonstration, and the solution's first lines as hints."""
    lines = str(query.columns.get("solution", "")).splitlines()
    return replace(query, demonstration=written(query) or "", hints=first_steps(lines))
