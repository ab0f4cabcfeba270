r"""Answers as canonical text: one spelling for what LaTeX, Unicode and plain typing write in many ways.

Nothing here interprets mathematics. Each rule rewrites one spelling into another of the same meaning, is linear in the
text, and runs on answers that were capped in length before.

>>> canonical(r"$\left( \dfrac12 ,\, 3 \right)$.")
'(\\frac{1}{2},3)'
>>> canonical("x ≤ 2·π"), canonical(r"1{,}234\!"), canonical("28 percent"), canonical("10⁻³"), canonical("2√16")
('x\\leq2\\pi', '1,234', '28%', '10^{-3}', '2\\sqrt{16}')
>>> canonical(r"**5**"), canonical(r"\textbf{5}"), canonical("sqrt(2pi)"), canonical("1 000 000"), canonical("]0, 1]")
('5', '5', '\\sqrt{2\\pi}', '1000000', '(0,1]')
>>> unicode_as_latex("x⁴ + √16 + ½"), plain_words("2pi"), plain_words(r"sqrt(2(x+1))"), plain_words(r"\text{sin}")
('x^{4} + \\sqrt{16} + \\frac{1}{2}', '2\\pi ', '\\sqrt{2(x+1)}', '\\text{sin}')
"""

from __future__ import annotations

import re
import unicodedata

from r3.verify.quantities import mark_bare_units

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "•": "*", "÷": "/", "∕": "/",
    "⁄": "/", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ", "∅": r"\emptyset ",
    "°": r"^\circ ", "∘": r"\circ ", "±": r"\pm ", "∓": r"\mp ", "′": "'", "’": "'", "″": "''", "，": ",", "；": ";",
    "…": r"\ldots ", "⋯": r"\ldots ", "ℝ": r"\mathbb{R}", "ℚ": r"\mathbb{Q}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℂ": r"\mathbb{C}", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∠": r"\angle ", "△": r"\triangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": "(", "⟩": ")", "ℓ": r"\ell ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ",
    # Invisible characters carry no meaning.
    "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "", "\u00ad": "",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "phi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta",
    "Λ": "Lambda", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_FRACTIONS = {
    sign: rf"\frac{{{top}}}{{{bottom}}}"
    for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
    for top, bottom in [unicodedata.normalize("NFKC", sign).split("\u2044")]
}
_TRANSLATION = str.maketrans(_SIGNS | {sign: rf"\{name} " for sign, name in _GREEK.items()} | _FRACTIONS)
# Bold, slanted and wide letters and digits are the plain ones.
_STYLED = re.compile("[\U0001d400-\U0001d7ff\uff01-\uff5e]")
# Raised digits become powers, not digits: 5² is not 52.
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-()ni0123456789+-")
# The sign has no bar: it goes over the whole number, or over one letter, or over what is in brackets.
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])?", re.ASCII)
_ROOT_NAMES = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}

_FUNCTION_NAMES = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln log lg exp max min gcd lcm det cis"
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_OTHER_NAMES = {
    "sqrt": r"\sqrt", "cbrt": r"\sqrt[3]", "pi": r"\pi", "theta": r"\theta", "alpha": r"\alpha", "beta": r"\beta",
    "infinity": r"\infty", "inf": r"\infty", "infty": r"\infty", "asin": r"\arcsin", "acos": r"\arccos",
    "atan": r"\arctan",
}  # fmt: skip
_NAMES = _OTHER_NAMES | {name: rf"\{name}" for name in FUNCTIONS}
_WORD = re.compile(
    r"\\text\{[^{}]*\}|(?<![A-Za-z\\])(?P<name>" + "|".join(sorted(_NAMES, key=len, reverse=True)) + r")(?![A-Za-z'])"
)
_ROOT_OF_BRACKETS = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(")


_END = r"(?![A-Za-z])"  # the end of a command's name
_AMOUNT = r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+)"
_MONEY = [(r"\\\$", "dollar"), ("€", "euro"), (r"(?:£|\\pounds(?![A-Za-z]))", "sterling"), ("¥", "yen")]
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),  # room between the rows of a matrix
        (r"\{,\}", ","),
        (r",\s*\\!\s*", ","),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ""),  # 3\,000
        (r"\\!", ""),
        *((sign + r"\s*" + _AMOUNT, r"\1\\text{" + name + "}") for sign, name in _MONEY),
        (r"\\pounds" + _END + r"|\\\$|[€£¥]", ""),
        (r"\$", ""),
        (r"\\[()\[\]](?=\s*$)|^\s*\\[(\[]", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)" + r"(?=[^A-Za-z]|\\)\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|noindent|tiny|scriptsize|footnotesize|small|"
         r"normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bfseries|itshape|mathstrut|strut)" + _END, " "),
        (r"^\s*\\(?:therefore|implies|Rightarrow)" + _END, ""),
        (r"\\(?:checkmark|blacksquare|qed)" + _END + r"\s*\.?\s*$", ""),
        (r"^\s*\\begin\{cases\}([^&{}]*=[^&{}]*)\\\\([^&{}]*=[^&{}]*)\\end\{cases\}\s*$", r"\1,\2"),
        (r"\\hspace\*?\s*\{[^{}]*\}", " "),
        (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
        (r"^\s*(?:=(?!=)|\\approx" + _END + r"|≈)", ""),  # nothing stands before it
        (r"\\color\s*\{[A-Za-z]+\}", " "),
        (r"\\textcolor\s*\{[A-Za-z]+\}\s*\{", r"\\text{"),
        (r"(?<!\\)\\(?:[,;:> ]|quad" + _END + r"|qquad" + _END + r")|~", " "),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|pmb|textbf|textit|textrm|textnormal|textsf|texttt|emph|"
         r"underline|uline|mbox|hbox|fbox|operatorname)\*?\s*\{", r"\\text{"),
        (r"\\boldsymbol" + _END, " "),
        (r"\\text\s+\{", r"\\text{"),
    ]
]  # fmt: skip
_LATER_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\text\{([A-Za-z])\}", r" \1 "),
        (r"^\s*\\text\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?\s*[:=]?\s*\}\s*[:=]?(?=.)", ""),
        (r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r"(?:\\%|%|(?<![A-Za-z])(?:percentage|percent|per\s+cent|pct)(?![A-Za-z]))", "%"),
        (r"\\text\{\s*%\s*\}", "%"),
        (r"\\[dtc]frac" + _END, r"\\frac"),
        (r"\\[dt]binom" + _END, r"\\binom"),
        (r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"\{([^{}]*)\\choose" + _END + r"([^{}]*)\}|^([^{}]*)\\choose" + _END + r"([^{}]*)$", r"\\binom{\1\3}{\2\4}"),
        (r"\{([^{}]*)\\over" + _END + r"([^{}]*)\}", r"\\frac{\1}{\2}"),
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
        (r"\\infin" + _END, r"\\infty "),
        (r"\\(?:simeq|doteq)" + _END, r"\\approx "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ" + _END + r"|\\degree" + _END, r"\\degree "),
        (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", r"\1"),
        (r"\\prime" + _END + r"\s*|\^\s*(?=')", "'"),
        (r"\.{3,}|\\(?:[lc]?dots[cbmio]?)" + _END, r"\\ldots "),
        (r"\\var(epsilon|phi|theta)" + _END, r"\\\1"),
        (r"\\dot\s*\{?(\d)\}?", r"\\overline{\1}"),
        (r"\\overline\s*\{\s*([A-Z]\s*[A-Z])\s*\}", r"\1"),  # a segment and its length go by the same name
        (r"\\langle" + _END, "("),
        (r"\\rangle" + _END, ")"),
        # Degrees inside a function are an angle, not a unit.
        (r"(\\(?:sin|cos|tan|cot|sec|csc|cis)" + _END + r"(?:\s*\^\{?\d\}?)?\s*\(?\s*)(\d+(?:\.\d+)?)\s*\\degree ",
         r"\1(\2\\pi/180)"),
        (r"(?<![\dA-Za-z}])(\d+)_\{\s*10\s*\}", r"\1"),  # base ten is no base
        (r"\\bmod" + _END, r"\\mod "),
        (r"\\(?:emptyset|varnothing)" + _END, r"\\{\\}"),
    ]
]  # fmt: skip
_MARKDOWN = re.compile(
    r"\s*(?:\*\*(?P<bold>[^*]+)\*\*|__(?P<strong>[^_]+)__|`+(?P<code>[^`]+)`+|\*(?P<em>[^*]+)\*)\s*[.]?\s*"
)
_TEXT = re.compile(r"\\text\{")
# What makes the contents of \\text{} words: two letters together, a ratio of units, a lone letter (also in brackets).
_WORDS = re.compile(r"[A-Za-z][\s.]*[A-Za-z]|^\s*[A-Za-z]+(?:/[A-Za-z]+)+\s*$|^\s*\(?[A-Za-z]\)?\s*$")
_COUNTED = re.compile(r"\s*([+-]?\d[\d.,/]*)\s+([A-Za-z][A-Za-z\s.'-]*)", re.ASCII)
# Thousands set apart by spaces or, in Switzerland, by apostrophes.
_GROUPED = re.compile(
    r"(?<![\d.,^_}'A-Za-z])(?<!\d\s)([1-9]\d{0,2}(?:[\s']\d{3})+)(?![\d'/,]|\s*(?:\\frac|[\d/^_]))", re.ASCII
)
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d+)\s*\\ldots ?(?![\d.])", re.ASCII)
_PERIOD = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)", re.ASCII)
_INSIDE = r"([^\[\](),;]+[,;][^\[\](),;]+)"
_START = r"(?:(?<![A-Za-z0-9})])|(?<=\\cup)|(?<=\\cap)|(?<=\\in)|(?<=\\setminus))"
_INTERVAL = re.compile(rf"{_START}(?P<open>[\[\](]){_INSIDE}(?P<close>[\])\[])")
_SET = re.compile(r"\\\{([a-z])(?:\\in\\mathbb\{R\})?(?::|\\mid(?![A-Za-z])|\|)([^{}:|,;]*)\\\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)|\{((?:[^{}]|\{[^{}]*\})*)\})\s*(?:(\d)|\{((?:[^{}]|\{[^{}]*\})*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(?:(\d(?!\d)|[A-Za-z])|\(([^()]*)\))")
_SHORT_POWER = re.compile(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}")
# A space carries meaning between two digits (5 5, 1 1/2), and after a command (\sin b).
_SPACE = re.compile(r"(?<=\d)\s+(?=[\d.])|(\\[A-Za-z]+)\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=[A-Za-z])|\s+")
_THREE_DIGITS = re.compile(r"\d{3}(?!\d)")
_EDGES = " \t\r\n.,;:\\"


def canonical(text: str) -> str:
    """One spelling of an answer. Equal canonical texts are equal answers; unequal ones may still be."""
    while match := _MARKDOWN.fullmatch(text):
        text = match["bold"] or match["strong"] or match["code"] or match["em"]
    text = unicode_as_latex(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = plain_words(_without_fonts(text))
    for pattern, replacement in _LATER_RULES:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda m: re.sub(r"[\s']", "", m[1]), text)
    text = _REPEATING.sub(_repeating, text)
    text = mark_bare_units(text)
    text = _SHORT_FRACTION.sub(_braced_fraction, text)
    text = _SHORT_ROOT.sub(lambda m: rf"\sqrt{m[1] or ''}{{{m[2] or m[3] or ''}}}", text)
    text = _SHORT_POWER.sub(r"\1\2 ", text)
    text = _SPACE.sub(lambda m: f"{m[1]} " if m[1] else (" " if _separates(m) else ""), text)
    text = re.sub(r",+", ",", text)
    text = _closed_edges(_INTERVAL.sub(_with_round_brackets, text))
    set_builder = _SET.fullmatch(text)
    return _condition(set_builder) if set_builder else text


def _without_fonts(text: str) -> str:
    r"""\text{…} around mathematics taken off: \textbf{5}, \mathbf{x+1}. Around words it stays."""
    pieces, start = [], 0
    for match in _TEXT.finditer(text):
        if match.start() < start:
            continue
        end = _closing(text, match.end())
        if end is None:
            break
        pieces.append(text[start : match.start()])
        pieces.append(_unwrapped(text[match.end() : end], after=pieces[-1][-1:]))
        start = end + 1
    return "".join(pieces) + text[start:]


def _unwrapped(contents: str, after: str) -> str:
    if contents.strip() in FUNCTIONS:
        return rf"\{contents.strip()} "
    if counted := _COUNTED.fullmatch(contents):  # \text{5 apples}
        return rf"{counted[1]}\text{{ {counted[2]}}}"
    if _WORDS.search(re.sub(r"\\[A-Za-z]+", "", contents)) or not contents.isascii():
        return rf"\text{{{contents}}}"
    return f"{{{contents}}}" if after in ("^", "_") else contents


def _closing(text: str, start: int) -> int | None:
    """Where the brace closes whose contents begin at `start`."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return None


def _repeating(match: re.Match[str]) -> str:
    r"""0.333\ldots and 0.1212\ldots are exact; of 3.14\ldots nobody knows how it goes on."""
    period = _PERIOD.fullmatch(match[2])
    if period is None:
        return match[0]
    return rf"{match[1] or '0'}.{period[1]}\overline{{{period[2] or period[3]}}}"


def _with_round_brackets(match: re.Match[str]) -> str:
    """]0,1[ is (0,1)."""
    start = "(" if match["open"] == "]" else match["open"]
    return f"{start}{match[2]}{')' if match['close'] == '[' else match['close']}"


def _condition(match: re.Match[str]) -> str:
    r"""\{x:x>0\} is x>0."""
    name, condition = match[1], match[2]
    related = re.search(r"[<>]|\\(?:leq|geq|neq)(?![A-Za-z])", condition)
    return condition if related and name in condition else match[0]


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


# ---------------------------------------------- what people type without LaTeX


def unicode_as_latex(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_LEVEL)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_LEVEL)}}}", text)
    text = _STYLED.sub(lambda m: unicodedata.normalize("NFKC", m[0]), text)
    text = _ROOT.sub(lambda m: _ROOT_NAMES[m[1]] + (f"{{{m[2]}}}" if m[2] else ""), text)
    return text.translate(_TRANSLATION)


def plain_words(text: str) -> str:
    """Names of functions and constants as commands, and roots of brackets as roots of braces."""
    text = _WORD.sub(lambda m: f"{_NAMES[m['name']]} " if m["name"] else m[0], text)
    return _with_braced_roots(text)


def _with_braced_roots(text: str) -> str:
    pieces, position = [], 0
    while match := _ROOT_OF_BRACKETS.search(text, position):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += (text[end] == "(") - (text[end] == ")")
            if depth == 0:
                break
        else:
            break
        inner = _with_braced_roots(text[match.end() : end])
        pieces.append(f"{text[position : match.start()]}\\sqrt{match[1] or ''}{{{inner}}}")
        position = end + 1
    return "".join(pieces) + text[position:]
