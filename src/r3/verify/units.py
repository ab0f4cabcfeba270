r"""Units: found, named in one way, and set apart from the value.

A unit is a known word after a number, or any \text{…} after a value. Bare single letters (5 m) count only after a space
and at the end: elsewhere they are variables.

>>> split_unit(r"15\text{square centimeters}"), split_unit(r"90\degree"), split_unit(r"\text{Even}")
(('15', 'cm^2'), ('90', 'degree'), ('\\text{Even}', ''))
>>> split_unit(r"3\text{m}/\text{s}"), conflict("m", "cm"), conflict("m", ""), conflict("million", "")
(('3', 'm/s'), True, False, True)
"""

from __future__ import annotations

import re

# One line a unit: the name, then its other spellings (plurals are made below).
_NAMES = """
mm millimeter millimetre
cm centimeter centimetre
m meter metre
km kilometer kilometre
in inch
ft foot feet
yd yard
mile mi
g gram
kg kilogram
mg milligram
ton tonne
lb lbs pound
oz ounce
second sec
minute min
hour hr
day
week
month
year yr
ml milliliter millilitre
l liter litre
gallon gal
quart
pint
cup
dollar usd
cent
degree deg
radian rad
mph
kph kmh kmph
unit
square sq
cubic cu
"""
_ONE_LETTER = "mgls"
_ALIASES = {spelling: line.split()[0] for line in _NAMES.split("\n") if line.strip() for spelling in line.split()}
_ALIASES |= {f"{spelling}s": name for spelling, name in _ALIASES.items() if len(spelling) > 2}
_ALIASES |= {"inches": "in"}

_WORD = "|".join(sorted((re.escape(w) for w in _ALIASES if len(w) > 1), key=len, reverse=True))
_BARE = re.compile(
    rf"(?<=[\d}}])\s*((?:(?:{_WORD})\b[\s./]*)+|\s[{_ONE_LETTER}](?=\s*(?:[,;^]|$)))(?![A-Za-z(=+*])", re.IGNORECASE
)
_UNIT = r"(?:\\text\{[^{}]*\}|\\degree(?:\s*[CF](?![A-Za-z]))?)(?:\^\{?-?\d\}?)?"
_TRAILING = re.compile(
    rf"(?P<value>.*?[^\\\s])\s*(?P<unit>{_UNIT}(?:[/*]?\s*(?:{_UNIT}|(?<=/)[A-Za-z]+(?:\^\{{?-?\d\}}?)?))*)\s*",
    re.DOTALL,
)
_POWERS = {"square": "2", "cubic": "3"}
_SCALES = {"dozen", "hundred", "thousand", "million", "billion", "trillion"}
_VAGUE = {"unit", "unit^2", "unit^3"}


def mark_bare_units(text: str) -> str:
    r"""`5 cm` as `5\text{cm}`: done before spaces are dropped, since `5m` is algebra and `5 m` is a length."""
    return _BARE.sub(lambda m: rf"\text{{{m[1].strip()}}}", text)


def split_unit(text: str) -> tuple[str, str]:
    """The value and its unit's name; "" for none. A text that is nothing but a word is the value itself."""
    match = _TRAILING.fullmatch(text)
    if match is None or match["value"].endswith(tuple("=<>^_,+-*/")) or match["value"].endswith(r"\in"):
        return text, ""
    unit = re.sub(r"\\text\{([^{}]*)\}|\\", lambda m: _named(m[1] or ""), match["unit"])
    return match["value"], re.sub(r"[{}\s]+$|[{}]", "", unit)


def conflict(one: str, other: str) -> bool:
    """Whether two units contradict: both there and not the same. A word that scales (million) is never ignored."""
    if one == other:
        return False
    if _SCALES & {*re.split(r"\W+", one), *re.split(r"\W+", other)}:
        return True
    return bool(one and other) and not {one, other} & _VAGUE


def _named(words: str) -> str:
    """One name for each spelling: square inches and sq in are in^2."""
    names, power = [], ""
    for word in re.split(r"[\s.~]+", words.lower()):
        name = _ALIASES.get(word, word)
        if name in _POWERS:
            power = _POWERS[name]
        elif name:
            names.append(f"{name}^{power}" if power else name)
            power = ""
    return " ".join(names)
