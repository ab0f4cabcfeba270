r"""Answers as canonical text: one spelling for what LaTeX, Unicode and plain typing write in many ways.

Nothing here interprets mathematics. Each rule rewrites one spelling into another of the same meaning, is linear in the
text, and runs on answers that were capped in length before.

>>> canonical(r"$\left( \dfrac12 ,\, 3 \right)$.")
'(\\frac{1}{2},3)'
>>> canonical("x ≤ 2·π"), canonical(r"1{,}234\!"), canonical("28 percent")
('x\\leq2\\pi', '1,234', '28%')
"""

from __future__ import annotations

import re

from r3.verify.units import mark_bare_units

# Unicode spellings. Superscripts become powers; they must not become digits (NFKC would turn 5² into 52).
_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "⁄": "/",
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "√": r"\sqrt", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ",
    "±": r"\pm ", "∓": r"\mp ", "′": "'", "’": "'", "，": ",", "；": ";", "（": "(", "）": ")", "％": "%", "＝": "=",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "²": "^2", "³": "^3", "¹": "^1", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ",
    "£": "", "€": "", "¥": "",
    # Invisible characters carry no meaning.
    "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "", "\u00ad": "",
} | {chr(0xFF10 + d): str(d) for d in range(10)}  # fmt: skip
_TRANSLATION = str.maketrans(_UNICODE)

_END = r"(?![A-Za-z])"  # the end of a command's name
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\$|\\pounds" + _END, ""),  # money signs are units
        (r"\$", ""),
        (r"\\[()\[\]](?=\s*$)|^\s*\\[(\[]", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)" + r"(?=[^A-Za-z]|\\)\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|noindent|boldsymbol)" + _END, " "),
        (r"\{,\}", ","),
        (r",\s*\\!\s*", ","),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ""),  # 3\,000
        (r"\\!", ""),
        (r"(?<!\\)\\(?:[,;:> ]|quad" + _END + r"|qquad" + _END + r")|~", " "),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|textbf|textit|textrm|textnormal|textsf|mbox|hbox|operatorname)"
         r"\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\{([A-Za-z])\}", r" \1 "),
        (r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r"(?:\\%|%|(?<![A-Za-z])(?:percentage|percent|pct)(?![A-Za-z]))", "%"),
        (r"\\text\{\s*%\s*\}", "%"),
        (r"\\[dtc]frac" + _END, r"\\frac"),
        (r"\\leqslant" + _END + r"|\\le" + _END + "|<=", r"\\leq "),
        (r"\\geqslant" + _END + r"|\\ge" + _END + "|>=", r"\\geq "),
        (r"\\not\s*=|\\ne" + _END + r"|!=", r"\\neq "),
        (r"\\lt" + _END, "<"),
        (r"\\gt" + _END, ">"),
        (r"\\(?:cdot|times|ast)" + _END, "*"),
        (r"\*\*", "^"),
        (r"(?<=\d)\s*\*\s*(?=[A-Za-z]|\\(?!frac))", ""),  # 2*x is 2x, but 2*\frac{1}{3} is no mixed number
        (r"\\(?:lbrace)" + _END, r"\\{"),
        (r"\\(?:rbrace)" + _END, r"\\}"),
        (r"\\(?:[lr]?vert)" + _END, "|"),
        (r"\\(?:infin|infty)" + _END + r"|(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"\\(?:simeq|doteq)" + _END, r"\\approx "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ" + _END + r"|\\degree" + _END, r"\\degree "),
        (r"\\var(epsilon|phi|theta)" + _END, r"\\\1"),
        (r"\\dot\s*\{?(\d)\}?", r"\\overline{\1}"),
        (r"\\langle" + _END, "("),
        (r"\\rangle" + _END, ")"),
        # Degrees inside a function are an angle, not a unit.
        (r"(\\(?:sin|cos|tan|cot|sec|csc)" + _END + r"(?:\s*\^\{?\d\}?)?\s*\(?\s*)(\d+(?:\.\d+)?)\s*\\degree ",
         r"\1(\2\\pi/180)"),
        (r"(?<![\dA-Za-z}])(\d+)_\{\s*10\s*\}", r"\1"),  # base ten is no base
        (r"\\bmod" + _END, r"\\mod "),
        (r"\\(?:emptyset|varnothing)" + _END + "|∅", r"\\{\\}"),
    ]
]  # fmt: skip
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)|\{((?:[^{}]|\{[^{}]*\})*)\})\s*(?:(\d)|\{((?:[^{}]|\{[^{}]*\})*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(?:([0-9A-Za-z])|\(([^()]*)\))")
_SHORT_POWER = re.compile(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}")
# A space carries meaning between two digits (5 5, 1 1/2), and after a command (\sin b).
_SPACE = re.compile(r"(?<=\d)\s+(?=[\d.])|(\\[A-Za-z]+)\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=[A-Za-z])|\s+")
_THREE_DIGITS = re.compile(r"\d{3}(?!\d)")
_EDGES = " \t\r\n.,;:\\"


def canonical(text: str) -> str:
    """One spelling of an answer. Equal canonical texts are equal answers; unequal ones may still be."""
    text = text.translate(_TRANSLATION)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = mark_bare_units(text)
    text = _SHORT_FRACTION.sub(_braced_fraction, text)
    text = _SHORT_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or ''}}}", text)
    text = _SHORT_POWER.sub(r"\1\2 ", text)
    text = _SPACE.sub(lambda m: f"{m[1]} " if m[1] else (" " if _separates(m) else ""), text)
    text = re.sub(r",+", ",", text)
    return _closed_edges(text)


def _braced_fraction(match: re.Match[str]) -> str:
    top = match[1] if match[1] is not None else match[2]
    bottom = match[3] if match[3] is not None else match[4]
    return rf"\frac{{{top}}}{{{bottom}}}"


def _separates(match: re.Match[str]) -> bool:
    """Whether this space says something: between two digits or letters, or in a list of numbers."""
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    if before == ",":  # 32, 349 is a list of two; 32,349 is a number
        return _THREE_DIGITS.match(match.string, match.end()) is not None
    return (before.isdigit() and (after.isdigit() or after == ".")) or (before.isalpha() and after.isalpha())


def _closed_edges(text: str) -> str:
    r"""Without the dots, commas and stray backslashes around an answer; an escaped brace at the end stays."""
    text = text.strip(" \t\r\n").rstrip(_EDGES).lstrip(" \t\r\n,;:")
    return text.removeprefix(r"\ ")
