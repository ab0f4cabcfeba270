r"""What people type without LaTeX, as LaTeX: Unicode signs, raised digits, function names, sqrt(…).

>>> unicode_as_latex("x⁴ + √16 + ½"), plain_words("2pi"), plain_words(r"sqrt(2(x+1))"), plain_words(r"\text{sin}")
('x^{4} + \\sqrt{16} + \\frac{1}{2}', '2\\pi ', '\\sqrt{2(x+1)}', '\\text{sin}')
"""

from __future__ import annotations

import re
import unicodedata

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
