r"""The fast path: normalised text and exact numbers decide most answers in microseconds.

It says right, wrong, or None for "ask the symbolic path". It says wrong only when that is certain.

>>> decide(r"\frac{1}{2}", "0.5"), decide("1/2", "1/3"), decide("x^2+1", "1+x^2"), decide("x", "y-y+x")
(True, False, True, None)
"""

from __future__ import annotations

import re
from functools import lru_cache

from r3.verify.canonical import canonical
from r3.verify.equality import AnyShape, Judge, compare, is_near
from r3.verify.numbers import Number, read_number, same_number
from r3.verify.outline import Leaf, shape
from r3.verify.units import conflict

_WORDS = re.compile(r"(?:\\text\{(?P<text>[^{}\\]*[^\W\d_][^{}\\]*)\}|(?P<bare>[^\W\d_]+))", re.ASCII)
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_BASED = re.compile(r"\(?\d[0-9A-Z]*\)?_(?:\w|\{\w+\}|\\text\{\w+\}|\{\\text\{\w+\}\})\s*", re.ASCII)
_CHOSEN = re.compile(r"(?:\\text\{\s*)?\(?([A-Z])(?:\)\s*\}?|\.\}?|:\}?)(?P<value>[^A-Z()]+)")  # (C) 5
_TIME = re.compile(r"\d{1,2}:\d\d", re.ASCII)
_cached_shape = lru_cache(maxsize=4096)(lambda text: shape(canonical(text)))
_cached_number = lru_cache(maxsize=8192)(read_number)


def outline(text: str) -> AnyShape:
    """The outline of an answer as written, cached: golds come up again and again."""
    return _cached_shape(text)


def decide(gold: str, answer: str) -> bool | None:
    """Whether the answer equals the gold; None if text and exact numbers cannot tell."""
    return compare(outline(gold), outline(answer), _JUDGE)


def judge(gold: AnyShape, answer: AnyShape) -> bool | None:
    """Two leaves, or two outlines that differ; None if only the symbolic path can tell."""
    if not isinstance(gold, Leaf) or not isinstance(answer, Leaf):
        return False if _number(gold) or _number(answer) else None
    if gold.percent != answer.percent or conflict(gold.unit, answer.unit):
        return False
    if not answer.text or not gold.text:
        return False
    if gold.text == answer.text:
        return True
    gold_number, answer_number = _cached_number(gold.text), _cached_number(answer.text)
    if gold_number and answer_number:
        return same_number(gold_number, answer_number)
    if (choice := _CHOICE.fullmatch(gold.text)) and (chosen := _CHOSEN.fullmatch(answer.text)):
        return choice[1] == chosen[1]
    if _words(gold.text) is not None or _words(answer.text) is not None:
        return _words(gold.text, shortest=2) == _words(answer.text, shortest=2)
    if _literal(gold.text) or _literal(answer.text):
        return False  # numerals in a base, times: only the same text is the same
    return True if _terms(gold.text) == _terms(answer.text) else None


def near(gold: AnyShape, written: Number) -> bool | None:
    exact = _number(gold)
    return is_near(exact.value, written) if exact else None


_JUDGE = Judge(judge, near)


def _number(value: AnyShape) -> Number | None:
    return _cached_number(value.text) if isinstance(value, Leaf) else None


def _words(text: str, shortest: int = 4) -> str | None:
    """A word answer, letter case aside; None for mathematics. Short bare letters are words only beside a word.

    A lone capital is a choice: (C) is C.
    """
    if match := _CHOICE.fullmatch(text):
        return match[1]
    match = _WORDS.fullmatch(text)
    if match is None or len(match["bare"] or text) < shortest:
        return None
    words = " ".join((match["text"] or match["bare"]).split()).strip(" .")
    lone = _CHOICE.fullmatch(words) if match["text"] else None
    return lone[1] if lone else words.casefold()


def _literal(text: str) -> bool:
    return bool(_BASED.fullmatch(text) or _TIME.fullmatch(text))


def _terms(text: str) -> list[str]:
    """The terms of a top-level sum, sorted: addition commutes."""
    terms, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in "+-" and depth == 0 and i > start and text[i - 1] not in "*/^_":
            terms.append(text[start:i].strip())
            start = i
    terms.append(text[start:].strip())
    return sorted(term if term[:1] in ("+", "-") else f"+{term}" for term in terms)
