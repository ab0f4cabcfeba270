r"""Plain numbers, exactly: integers, decimals, fractions, mixed numbers, powers of ten. Never a float.

>>> read_number("-1,234.50")
Number(value=Fraction(-2469, 2), decimals=2, digits=6)
>>> read_number(r"12\frac{3}{5}").value, read_number("3.5*10^{-2}").value, read_number("7x")
(Fraction(63, 5), Fraction(7, 200), None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LARGEST_EXPONENT = 4_000  # of ten: numbers beyond it are left to the symbolic path's own limits
# A decimal gold with fewer significant digits is exact (0.5 is a half); with this many it may be a rounded value.
ROUNDED_GOLD_DIGITS = 3
# A decimal stands for an exact gold that it does not equal only when it is that gold to (nearly) machine precision.
MACHINE_DIGITS = 10

_PLAIN = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+|\d+\."
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)(?:
        (?P<whole>\d+)?\ ?\\frac\{{(?P<top>-?(?:{_PLAIN}))\}}\{{(?P<bottom>-?(?:{_PLAIN}))\}}
      | (?P<mixed>\d+)\ (?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)
      | (?P<slash_top>{_PLAIN})/(?P<slash_bottom>{_PLAIN})
      | (?P<start>\d*)\.(?P<fixed>\d*)\\overline\{{(?P<period>\d+)\}}
      | (?P<decimal>{_PLAIN})(?:(?:\*10\^|[eE])\{{?(?P<exponent>[+-]?\d+)\}}?)?
      | 10\^\{{?(?P<power>[+-]?\d+)\}}?
    )""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; for one written as a decimal, how many decimals and significant digits were written."""

    value: Fraction
    decimals: int | None = None
    digits: int = 0


def read_number(text: str) -> Number | None:
    """The number that a canonical text is, or None if it is anything else (or too large to hold)."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        number = _read(match)
    except ZeroDivisionError:
        return None
    if number is None or match["sign"] != "-":
        return number
    return Number(-number.value, number.decimals, number.digits)


def _read(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    if part["top"] is not None:
        fraction = _value(part["top"]) / _value(part["bottom"])
        if part["whole"] is None:
            return Number(fraction)
        # 3\frac{1}{2} is a mixed number; 3\frac{5}{2} is not one, and might be a product.
        return Number(int(part["whole"]) + fraction) if 0 < fraction < 1 else None
    if part["mixed"] is not None:
        fraction = Fraction(int(part["mixed_top"]), int(part["mixed_bottom"]))
        return Number(int(part["mixed"]) + fraction) if 0 < fraction < 1 else None
    if part["slash_top"] is not None:
        return Number(_value(part["slash_top"]) / _value(part["slash_bottom"]))
    if part["period"] is not None:
        return Number(_repeating(part["start"], part["fixed"], part["period"]))
    exponent = int(part["exponent"] or part["power"] or 0)
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    if part["decimal"] is None:
        return Number(Fraction(10) ** exponent)
    written = part["decimal"].replace(",", "")
    after_point = len(written.partition(".")[2])
    decimals = after_point - exponent if "." in written or part["exponent"] else None
    digits = len(written.replace(".", "").lstrip("0"))
    return Number(_value(written) * Fraction(10) ** exponent, decimals, digits)


def _value(written: str) -> Fraction:
    return Fraction(written.replace(",", "").rstrip("."))


def _repeating(start: str, fixed: str, period: str) -> Fraction:
    scale = 10 ** len(fixed)
    return Fraction(int(f"{start}{fixed}" or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))


def same_number(gold: Number, answer: Number) -> bool:
    """Whether the answer is the gold: exactly, or correctly rounded at the gold's own precision.

    >>> same = lambda gold, answer: same_number(read_number(gold), read_number(answer))
    >>> same("3.1416", "3.14159"), same("33.3", "100/3"), same("2.0001", "2"), same("0.5", "0.52"), same("14/3", "4.7")
    (True, True, False, False, False)
    """
    if gold.value == answer.value:
        return True
    finer = answer.decimals is None or (gold.decimals is not None and answer.decimals > gold.decimals)
    if gold.decimals is not None and gold.digits >= ROUNDED_GOLD_DIGITS and finer and answer.value.denominator != 1:
        return rounds_to(answer.value, gold)
    exact_gold = gold.decimals is None and gold.value.denominator != 1
    return (
        exact_gold and answer.digits >= MACHINE_DIGITS and answer.decimals is not None and rounds_to(gold.value, answer)
    )


def rounds_to(value: Fraction, rounded: Number) -> bool:
    """Whether `rounded` is `value` at the decimals it was written with."""
    assert rounded.decimals is not None
    if abs(rounded.decimals) > LARGEST_EXPONENT:
        return False
    unit = Fraction(10) ** -rounded.decimals
    return abs(value - rounded.value) * 2 <= unit
