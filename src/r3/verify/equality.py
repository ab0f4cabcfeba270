"""When two outlines are equal by our policy. The caller says how two single values compare.

Answers are three-valued: True, False, or None for "cannot tell". The fast path and the symbolic one run the same rules
and differ only in how they judge leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from r3.verify.numbers import Number, read_number
from r3.verify.outline import Chain, Items, Leaf, Matrix, is_name, renamed

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
