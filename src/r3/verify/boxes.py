r"""What counts as the answer, and what is refused unread. `docs/verifier.md` states the policy with examples.

>>> boxed_answer(r"<think>\boxed{3}</think> So \boxed{\frac{1}{2}}.")
Extract(answer='\\frac{1}{2}', reason='')
>>> boxed_answer("four").reason, boxed_answer(r"\boxed{4").reason, boxed_answer(r"\boxed{ }").reason
('no box', 'unclosed box', 'empty box')
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_ANSWER = 2_000
LONGEST_GOLD = 4_000
DEEPEST_NESTING = 40
_MENTIONS = 64  # how many \boxed without a brace to skip before giving up
_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")
_THINK_END = "</think>"
_BLANKS = "\t\r\n\u200b\u200c\u200d\u2060\ufeff\u00ad\u00a0\u2009\u202f\u2002\u2003"


class Extract(NamedTuple):
    """The text in the box, or "" and the reason why there is none."""

    answer: str
    reason: str = ""


def boxed_answer(completion: str) -> Extract:
    r"""What the last \boxed{} holds: of the text after the last </think> if a box stands there, else of the whole."""
    end_of_thought = completion.rfind(_THINK_END)
    if end_of_thought >= 0 and (start := _last_box(completion, end_of_thought)) is not None:
        return _contents(completion, start)
    start = _last_box(completion, 0)
    return Extract("", "no box") if start is None else _contents(completion, start)


def _last_box(text: str, after: int) -> int | None:
    r"""Where the contents of the last \boxed{ begin, searched from the end so that long texts cost nothing."""
    end = len(text)
    for _ in range(_MENTIONS):
        start = text.rfind("\\boxed", after, end)
        if start < 0:
            return None
        if match := _BOX.match(text, start):
            return match.end()
        end = start
    return None


def _contents(text: str, start: int) -> Extract:
    window = text[start : start + LONGEST_ANSWER + 1]
    depth = 1
    for match in _BRACE.finditer(window):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            answer = window[: match.start()]
            return Extract(answer) if answer.strip(" \t\r\n$") else Extract("", "empty box")
    return Extract("", "too long" if len(window) > LONGEST_ANSWER else "unclosed box")


def bare_gold(gold: str) -> str:
    r"""A reference answer without the box that some data sets leave around it; "" if there is none."""
    if "\\boxed" not in gold:
        return gold if gold.strip(" \t\r\n$") else ""
    return boxed_answer(gold).answer


def refusal(answer: str) -> str:
    """Why a text is refused without reading it, or "": answers are short and flat, hostile texts need not be."""
    if len(answer) > LONGEST_ANSWER:
        return "too long"
    depth = deepest = 0
    for match in _BRACKET.finditer(answer):
        depth += 1 if match[0] in "([{" else -1
        deepest = max(deepest, depth)
    if deepest > DEEPEST_NESTING:
        return "too deep"
    if any(not character.isprintable() and character not in _BLANKS for character in answer):
        return "unreadable"  # control characters, lone surrogates, changes of direction
    return ""
