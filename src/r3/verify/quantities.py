r"""What an answer measures: plain numbers, exactly, and their units.

Plain numbers, exactly: integers, decimals, fractions, mixed numbers, powers of ten. Never a float.

>>> read_number("-1,234.50")
Number(value=Fraction(-2469, 2), decimals=2, digits=6)
>>> read_number(r"12\frac{3}{5}").value, read_number("3.5*10^{-2}").value, read_number("7x")
(Fraction(63, 5), Fraction(7, 200), None)

Units: found, named in one way, and set apart from the value.

A unit is a known word after a number, or any \text{…} after a value. Bare single letters (5 m) count only after a space
and at the end: elsewhere they are variables. Words that scale (million, dozen) are multiplied into the value.

>>> split_unit(r"15\text{square centimeters}"), split_unit(r"90\degree"), split_unit(r"\text{Even}")
(('15', 'cm^2'), ('90', 'degree'), ('\\text{Even}', ''))
>>> split_unit(r"3\text{m}/\text{s}"), split_unit(r"1.5\text{million dollars}"), split_unit(r"60\text{mph}")
(('3', 'm/second'), ('1500000', 'dollar'), ('60', 'mile/hour'))
>>> conflict("m", "cm"), conflict("m", ""), conflict("", "students"), conflict("", "is wrong")
(True, False, False, True)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# ---------------------------------------------------------------------- numbers


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


# ------------------------------------------------------------------------ units


# One line per unit: the name, then its other spellings (plurals are made below).
_NAMES = """
mm millimeter millimetre
cm centimeter centimetre
m meter metre
km kilometer kilometre
in inch
ft foot feet
yd yard
mile mi
acre
g gram
kg kilogram
mg milligram
ton tonne
lb lbs pound
oz ounce
second sec s
minute min
hour hr h
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
dollar usd buck
cent penny pennies
euro eur
sterling gbp
yen
degree deg
radian rad
mile/hour mph
km/hour kph kmh kmph
way
person people
student
unit
square sq
cubic cu
"""
_ONE_LETTER = "mgls"
_ALIASES = {spelling: line.split()[0] for line in _NAMES.split("\n") if line.strip() for spelling in line.split()}
_ALIASES |= {f"{spelling}s": name for spelling, name in _ALIASES.items() if len(spelling) > 2}
_ALIASES |= {"inches": "in"}
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7}
_SCALES |= {"billion": 10**9, "trillion": 10**12}
_SCALES |= {f"{word}s": scale for word, scale in _SCALES.items()}

# Words that make another value of a number; of a gold too.
_ARITHMETIC_WORDS = """
half halves halved third thirds quarter quarters fourth fourths double doubled triple tripled twice thrice squared cubed
power factorial inverse reciprocal opposite times plus minus negative root mod modulo base percent percentage permille
basis ppm ppb grand gross score scores tens kilo mega giga mille tera milli micro nano mil mln mio bil bln binary octal
hexadecimal hex
"""
_ARITHMETIC = set(_ARITHMETIC_WORDS.split()) | set(_SCALES)
_ARITHMETIC_ENDING = re.compile(
    r".*illi(?:on|ard)s?|.*uple[ds]?|.*fold|"
    r"(?:.*(?:teen|tie|hundred|thousand|million)|ten|fif|six|seven|eigh|nin|twelf)ths?"
)
# Words of an answer that deny it, hedge, or say a second value.
_CHANGING_WORDS = """
not non never no none nor neither isn isnt false wrong incorrect untrue invalid error mistake reject rejected impossible
but however except without unless instead rather actually maybe perhaps probably possibly approximately about around
roughly nearly almost between beyond under over above below more less fewer greater smaller larger bigger least most
minimum maximum positive divided multiplied powers absolute conjugate complement transpose pair pairs couple couples
several many few zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety infinite infinity repeating recurring
repeated and per xor then else also this that these those was are were will would should could can cannot may might must
have has had did does
"""
_CHANGING = set(_CHANGING_WORDS.split())
# What an answer may say about itself.
_REMARK = re.compile(
    r"(?:is )?(?:the |our |my |a )?(?:final |correct |right |required )?(?:answer|ans|result|solution)"
)
_REMARKS = {"is correct", "is right", "in total", "in all", "total", "altogether", "exactly", "only", "each", "or so"}
_MOST_WORDS = 3  # of a unit that we do not know: more is a sentence

_WORD = "|".join(
    sorted((re.escape(w) for w in [*_ALIASES, *_SCALES] if len(w) > 1 and "/" not in w), key=len, reverse=True)
)
_BARE = re.compile(
    rf"(?<=[\d}}])\s*((?:(?:{_WORD})\b[\s./]*(?:per\s+)?)+|\s[{_ONE_LETTER}](?=\s*(?:[,;^]|$)))(?![A-Za-z(=+*])",
    re.IGNORECASE,
)
_UNIT = r"(?:\\text\{[^{}]*\}|\\degree(?:\s*[CF](?![A-Za-z]))?)(?:\^\{?-?\d\}?)?"
_TRAILING = re.compile(
    rf"(?P<value>.*?[^\\\s])\s*(?P<unit>{_UNIT}(?:[/*]?\s*(?:{_UNIT}|(?<=/)[A-Za-z]+(?:\^\{{?-?\d\}}?)?))*)\s*",
    re.DOTALL,
)
_POWERS = {"square": "2", "cubic": "3"}
_VAGUE = {"unit", "unit^2", "unit^3"}


def mark_bare_units(text: str) -> str:
    r"""`5 cm` as `5\text{cm}`: done before spaces are dropped, since `5m` is algebra and `5 m` is a length."""
    return _BARE.sub(lambda m: rf"\text{{{m[1].strip()}}}", text)


def split_unit(text: str) -> tuple[str, str]:
    """The value and its unit's name; "" for none. A text that is nothing but a word is the value itself."""
    match = _TRAILING.fullmatch(text)
    if match is None or match["value"].endswith(tuple("=<>^_,+-*/")) or match["value"].endswith(r"\in"):
        return text, ""
    unit = re.sub(r"\\text\{([^{}]*)\}|\\", lambda m: f" {_named(m[1] or '')}", match["unit"])
    unit = re.sub(r"\s*/\s*", "/", re.sub(r"[{}\s]+$|[{}]", "", unit)).replace(" ^", "^").strip()
    return _scaled(match["value"], unit)


def conflict(gold: str, answer: str) -> bool:
    r"""Whether an answer's unit contradicts the gold's: both there and not the same, or a word that is no unit.

    A gold's words are trusted to name what is counted, unless they say another value. An answer's are not: a model can
    write `5\text{ is wrong, it is 7}`.
    """
    if gold == answer:
        return False
    if _says_another_value(gold) or _says_another_value(answer) or not _harmless(answer):
        return True
    return bool(gold and answer) and not _is_remark(answer) and not {gold, answer} & _VAGUE


def _scaled(value: str, unit: str) -> tuple[str, str]:
    """With words that scale multiplied into a number; they stay in the unit of anything else."""
    words = unit.split()
    scales = [_SCALES[word] for word in words if word in _SCALES]
    number = read_number(value) if scales else None
    if number is None:
        return value, unit
    product = number.value
    for scale in scales:
        product *= scale
    return str(product), " ".join(word for word in words if word not in _SCALES)


def _harmless(unit: str) -> bool:
    """Whether an answer's words can only name what is counted: units, or a few words that say nothing of the value."""
    if not unit or _is_remark(unit):
        return True
    unknown = 0
    for word in re.split(r"[\s/*]+", unit):
        plain = re.sub(r"\^?-?\d$", "", word)
        if plain in _UNIT_NAMES:
            continue
        if len(plain) < 3 or plain in _CHANGING or not (plain.isascii() and plain.isalpha()):
            return False
        unknown += 1
    return unknown <= _MOST_WORDS


def _is_remark(unit: str) -> bool:
    return unit in _REMARKS or _REMARK.fullmatch(unit) is not None


def _says_another_value(unit: str) -> bool:
    return any(word in _ARITHMETIC or _ARITHMETIC_ENDING.fullmatch(word) for word in re.split(r"\W+", unit))


_UNIT_NAMES = {part for name in _ALIASES.values() for part in name.split("/")} | {"C", "F", "c", "f", "am", "pm"}


def _named(words: str) -> str:
    """One name for each spelling: square inches and sq in are in^2, miles per hour and mph are mile/hour."""
    names, power = [], ""
    words = re.sub(r"(?<![A-Za-z])([ap])\.?\s?m(?![A-Za-z])\.?", r"\1m", words)
    for word in re.split(r"[\s.~]+", words):
        if len(word) == 1 and word.isupper() and word not in "LCF":
            names.append(word)  # M may be a million, and K a thousand
            continue
        name = "/".join(_ALIASES.get(part, part) for part in word.lower().split("/"))
        if name in _POWERS:
            power = _POWERS[name]
        elif name:
            names.append(f"{name}^{power}" if power else name)
            power = ""
    return re.sub(r" (?:per|an?|/)(?= )", "/", " ".join(names)).replace("/ ", "/")
