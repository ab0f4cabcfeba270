r"""When two outlines are equal by our policy. The caller says how two single values compare.

Answers are three-valued: True, False, or None for "cannot tell". The fast path and the symbolic one run the same rules
and differ only in how they judge leaves.

The fast path: normalised text and exact numbers decide most answers in microseconds.

It says right, wrong, or None for "ask the symbolic path". It says wrong only when that is certain.

>>> decide(r"\frac{1}{2}", "0.5"), decide("1/2", "1/3"), decide("x^2+1", "1+x^2"), decide("x", "y-y+x")
(True, False, True, None)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from r3.verify.canonical import canonical
from r3.verify.outline import Chain, Items, Leaf, Matrix, is_name, renamed, shape
from r3.verify.quantities import Number, conflict, read_number, same_number

Any3 = bool | None
AnyShape: TypeAlias = Leaf | Items | Chain | Matrix


class Judge(NamedTuple):
    """How two single values compare."""

    same: Callable[[AnyShape, AnyShape], Any3]  # two leaves; and two other outlines (an inequality, an interval)
    near: Callable[[AnyShape, Number], Any3]  # an exact value and the decimal written after ≈


_REMARK_TOLERANCE = Fraction(1, 100)
_UNORDERED = {"", "{}"}
_MOST_ITEMS = 200  # of a set: each is compared with each


def compare(gold: AnyShape, answer: AnyShape, judge: Judge) -> Any3:
    """Whether the answer equals the gold."""
    if gold.text == answer.text and _complete(gold):
        return True
    if isinstance(gold, Chain) or isinstance(answer, Chain):
        return _chains(gold, answer, judge)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return judge.same(gold, answer)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        return every(_ordered(g, a, judge) for g, a in zip(gold.rows, answer.rows, strict=True))
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _items(gold, answer, judge)
    for several, other in ((gold, answer), (answer, gold)):
        if isinstance(several, Items) and several.brackets in _UNORDERED and isinstance(other, Leaf | Matrix):
            pairs = ((item, other) if several is gold else (other, item) for item in several.items)
            return every(compare(g, a, judge) for g, a in pairs) if several.items else judge.same(gold, answer)
    return judge.same(gold, answer)


def _complete(gold: AnyShape) -> bool:
    """Equal text decides, unless a unit or percent sign was split off from it."""
    return not isinstance(gold, Leaf)


def _items(gold: Items, answer: Items, judge: Judge) -> Any3:
    brackets = {gold.brackets, answer.brackets}
    if brackets <= _UNORDERED:
        return _unordered(gold.items, answer.items, judge)
    if brackets == {"∪"}:
        return _unordered(gold.items, answer.items, judge) or judge.same(gold, answer)
    if "∪" in brackets:
        return judge.same(gold, answer)
    if brackets == {"", "()"} or len(brackets) == 1:
        if gold.names and sorted(gold.names) == sorted(answer.names):
            answer = renamed(answer, gold.names)
        return _ordered(gold.items, answer.items, judge)
    return False  # a set is no tuple, and an open end no closed one


def _ordered(gold: Sequence[AnyShape], answer: Sequence[AnyShape], judge: Judge) -> Any3:
    if len(gold) != len(answer):
        return False
    return every(compare(g, a, judge) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[AnyShape], answer: Sequence[AnyShape], judge: Judge) -> Any3:
    """Equal as sets: each gold is among the answers and each answer among the golds."""
    if max(len(gold), len(answer)) > _MOST_ITEMS:
        return False
    table = [[compare(g, a, judge) for a in answer] for g in gold]
    rows = every(_some(row) for row in table)
    columns = every(_some(row[j] for row in table) for j in range(len(answer)))
    return every([rows, columns])


def _chains(gold: AnyShape, answer: AnyShape, judge: Judge) -> Any3:
    if isinstance(gold, Chain) and isinstance(answer, Chain):
        if gold.subject and gold.subject == answer.subject:
            return compare(_last(gold), Chain(answer.text, "", answer.parts, answer.remarks), judge)
        if not gold.subject or not answer.subject or not is_name(gold.subject):
            return judge.same(gold, answer)  # two equations
        if read_number(_last(gold).text) and read_number(_last(answer).text):
            return False  # y=5 is not x=5
        return judge.same(gold, answer)
    if isinstance(gold, Chain):
        return compare(_last(gold), answer, judge) if gold.subject and is_name(gold.subject) else False
    assert isinstance(answer, Chain)
    if isinstance(gold, Items) and answer.subject and len(answer.parts) == 1:
        return compare(gold, answer.parts[0], judge)
    # Every part of a chain must hold: 7 = 5 is no way to write 5.
    return every(
        [*(compare(gold, part, judge) for part in answer.parts), *(_remark(gold, r, judge) for r in answer.remarks)]
    )


def _last(gold: Chain) -> AnyShape:
    return gold.parts[-1]


def _remark(gold: AnyShape, remark: AnyShape, judge: Judge) -> Any3:
    """A decimal after ≈ is a remark on an exact answer: it must be right to the digits it shows."""
    written = read_number(remark.text)
    return False if written is None else judge.near(gold, written)


def is_near(exact: Fraction, written: Number) -> bool:
    """Whether a decimal is the value rounded or cut off at its last digit, or off by less than 1 %."""
    error = abs(exact - written.value)
    if error <= _REMARK_TOLERANCE * abs(exact):
        return True
    if written.decimals is None and written.value.denominator != 1:
        return False  # a fraction has no last digit
    unit = Fraction(10) ** -(written.decimals or 0)
    cut_off = written.value * exact >= 0 and abs(written.value) <= abs(exact)
    return 2 * error <= unit or (cut_off and error < unit)


def every(values: Iterable[Any3]) -> Any3:
    """False if any is False, else None if any is None, else True."""
    result: Any3 = True
    for value in values:
        if value is False:
            return False
        if value is None:
            result = None
    return result


def _some(values: Iterable[Any3]) -> Any3:
    result: Any3 = False
    for value in values:
        if value:
            return True
        if value is None:
            result = None
    return result


# ---------------------------------------------------------------- the fast path


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
