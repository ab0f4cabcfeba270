"""The slow path: math-verify's parser and grader, behind our own checks. Runs in caged workers only.

math-verify is lax where a reward must not be: it rounds floats to six places, takes differences below 1e-15 for zero
(so that 1/2004! "equals" 1/2006!), reads 9 % as 9 and `9 = 1` as 1, strips single letters as units, and lower-cases
variables. So text is outlined by our rules first (`compare`), each leaf is parsed by math-verify's own parser without
its guesses, numbers are compared exactly, and what it calls equal must also agree at a few points to many digits.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
import sympy.physics.units  # loaded late by sympy otherwise, with `eval`: see _literal
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify import verify
from math_verify.grader import is_relation, should_treat_as_complex, sympy_symbolic_eq
from sympy.parsing import sympy_parser

from r3.verify import equality
from r3.verify.equality import AnyShape, Judge, compare, is_near
from r3.verify.outline import Chain, Items, Leaf, Matrix
from r3.verify.quantities import ROUNDED_GOLD_DIGITS, Number, read_number, same_number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit; the cage has one
_SPELLING = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_READING = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_DIGITS = 40  # of agreement asked at each trial point
_POINTS = ("137/53", "311/97", "449/71")  # where functions are compared; positive, so that roots stay on one branch
LARGEST_BITS = 200_000  # of an exact number; 2006! has 19,000
# What the parser would guess at, or drop without a word: primes, transposes, bases, dots, roots of several bare digits.
_UNREADABLE = re.compile(
    r"[^\x20-\x7e]|\d \d|\\text|\\input|\\include|\\def|\\degree|%"
    r"|['\"]|!!|\^T(?![A-Za-z])|\d\)?_|\\ldots|\\sqrt\d\d|\\pm|\\mp|\?"
)


_LITERAL = re.compile(
    r"(?P<minus>-?)(?:Integer \((?P<integer>\d+) \)|Float \('(?P<float>\d*\.?\d*(?:[eE][+-]?\d+)?)' \))\s*", re.ASCII
)


class Unreadable(ValueError):
    """A text that the parser cannot read, or would have to guess at."""


class TooLarge(ValueError):
    """An exact number too large to hold."""


def decide(gold: str, answer: str) -> tuple[bool, str]:
    """Right or wrong, and why; for what the fast path could not tell."""
    sympy_parser.eval_expr = _literal  # only in this worker; elsewhere sympy stays as it is
    try:
        right = compare(equality.outline(gold), equality.outline(answer), _JUDGE)
    except Unreadable:
        return False, "unreadable"
    except TooLarge:
        return False, "too large"
    except (MemoryError, RecursionError, OverflowError) as error:
        return False, "memory" if isinstance(error, MemoryError) else "too large"
    if right is None:
        return False, "not proven"
    return right, "match" if right else "different"


def _literal(code: str, *_: object) -> Any:
    """In place of sympy's one use of `eval` on text, by which the parser reads digits: literals, and nothing else."""
    match = _LITERAL.fullmatch(code)
    if match is None:
        raise PermissionError("model text is never evaluated as code")
    number = sympy.Integer(match["integer"]) if match["integer"] else sympy.Float(match["float"])
    return -number if match["minus"] else number


def judge(gold: AnyShape, answer: AnyShape) -> bool | None:
    """Two leaves as values, other outlines as the sets and relations that math-verify reads."""
    known = equality.judge(gold, answer)
    if known is not None:
        return known
    leaves = isinstance(gold, Leaf) and isinstance(answer, Leaf)
    if not leaves and (isinstance(gold, Matrix) or isinstance(answer, Matrix) or not _sets_or_relations(gold, answer)):
        return False
    gold_tree, answer_tree = parsed(gold.text), parsed(answer.text)
    if _is_statement(gold_tree) != _is_statement(answer_tree):
        return False  # 1>2 is no way to write the empty set
    if leaves and _is_value(gold_tree) and _is_value(answer_tree):
        return _same_value(gold_tree, answer_tree, read_number(gold.text), read_number(answer.text))
    if is_relation(gold_tree) and is_relation(answer_tree):
        return _same_relation(_exact(gold_tree), _exact(answer_tree))
    return _graded(gold_tree, answer_tree)


def _is_statement(tree: Any) -> bool:
    """Whether a relation is about no unknown: 1>2 is true or false, and describes no set."""
    return isinstance(tree, sympy.logic.boolalg.Boolean) and not tree.free_symbols


def near(gold: AnyShape, written: Number) -> bool | None:
    """Whether the decimal after ≈ is true of the gold."""
    known = equality.near(gold, written)
    if known is not None or not isinstance(gold, Leaf):
        return known
    value = _exact(parsed(gold.text))
    if not _is_value(value) or value.free_symbols or not value.is_real:
        return False
    return is_near(_fraction(sympy.Rational(str(sympy.N(value, written.digits + 25)))), written)


_JUDGE = Judge(judge, near)


def _same_relation(gold: Any, answer: Any) -> bool:
    """Equations by proof or by math-verify's solving; inequalities by proof or by the numbers that fulfil them."""
    if isinstance(gold, sympy.Rel) and isinstance(answer, sympy.Rel):
        left, right = sympy.expand(gold.lhs - gold.rhs), sympy.expand(answer.lhs - answer.rhs)
        if left.free_symbols and left.free_symbols == right.free_symbols:
            ratio = sympy.cancel(left / right)
            if ratio.is_number and ratio.is_nonzero:  # multiples of each other; a negative one turns < round
                return bool((answer if ratio.is_positive else answer.reversedsign).func is gold.func)
        if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
            # math-verify takes differences below 1e-15 for none.
            return not ((left - right).is_number or (left + right).is_number) and _graded(gold, answer)
    if gold.free_symbols != answer.free_symbols or len(gold.free_symbols) != 1:
        return False
    try:
        return bool(gold.as_set() == answer.as_set())
    except (NotImplementedError, TypeError, ValueError):
        return False  # sympy cannot solve one of them


def _sets_or_relations(gold: AnyShape, answer: AnyShape) -> bool:
    """Whether the two can be the same set said in different ways: 0<x<1 and (0,1), or two equations."""
    if isinstance(gold, Chain) and isinstance(answer, Chain):
        return True
    return all(_is_set(s) or _RELATION.search(s.text) for s in (gold, answer))


def _is_set(outline: AnyShape) -> bool:
    return isinstance(outline, Items) and outline.brackets != ""


_RELATION = re.compile(r"[<>]|\\(?:leq|geq|neq|cup|cap|setminus|in|mathbb)(?![A-Za-z])")


@lru_cache(maxsize=512)
def parsed(text: str) -> Any:
    """A canonical text as sympy reads it, unevaluated; Unreadable if the parser has to guess."""
    text = _respelled(text)
    if _UNREADABLE.search(text):
        raise Unreadable(text)
    latex = normalize_latex(text, _SPELLING)
    try:
        tree = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_READING,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser raises bare Exception for every text that it cannot read
        raise Unreadable(text) from error
    if isinstance(tree, sympy.Basic) and tree.has(sympy.nan, sympy.zoo):
        raise Unreadable(text)
    _refuse_giants(tree)
    return _with_real_roots(_with_imaginary_unit(tree)) if r"\sqrt[" in text else _with_imaginary_unit(tree)


def _with_imaginary_unit(tree: Any) -> Any:
    """A lone i in a value is the imaginary unit, unless it counts the terms of a sum."""
    if not _is_value(tree) or tree.has(sympy.Sum, sympy.Product):
        return tree
    return tree.xreplace({s: sympy.I for s in tree.free_symbols if s.name == "i"})


def _with_real_roots(tree: Any) -> Any:
    """The odd root of a negative number is the real one, as it is where roots are written with a sign."""
    if not _is_value(tree):
        return tree
    roots = [
        power
        for power in tree.atoms(sympy.Pow)
        if power.base.is_negative and power.exp.is_Rational and power.exp.p == 1 and power.exp.q % 2
    ]
    return tree.xreplace({power: -sympy.Pow(-power.base, power.exp) for power in roots})


_MOD = re.compile(r"(?<![\d^])(\d+)\\mod\s*(\d+)")
_LOGARITHM = re.compile(r"\\log_(\w|\{\w+\})\s*(\d+(?:\.\d+)?)")
_CIS = re.compile(r"\\cis\s*(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\}|(\\?[a-z0-9]+))")
_CONJUGATE = re.compile(r"\\(?:overline|bar)\{([^{}]*(?<![A-Za-z])i(?![A-Za-z])[^{}]*)\}")


def _respelled(text: str) -> str:
    """Spellings that math-verify's parser does not know."""
    text = _MOD.sub(lambda m: str(int(m[1]) % int(m[2])) if int(m[2]) else m[0], text)
    text = _LOGARITHM.sub(r"\\log_{\1}{\2}", text)
    text = _CIS.sub(lambda m: f"e^{{i({m[1] or m[2] or m[3]})}}", text)
    return _CONJUGATE.sub(lambda m: "(" + re.sub(r"(?<![A-Za-z\\])i(?![A-Za-z])", "(-i)", m[1]) + ")", text)


def _is_value(tree: Any) -> bool:
    return isinstance(tree, sympy.Expr) and not isinstance(tree, sympy.MatrixBase)


def _refuse_giants(tree: Any) -> None:
    """Refuse numbers whose exact value would not fit, before anything evaluates them."""
    if isinstance(tree, sympy.Basic) and not isinstance(tree, sympy.MatrixBase):
        for part in tree.args:
            _refuse_giants(part)
        if isinstance(tree, sympy.Pow | sympy.exp | sympy.factorial) and tree.is_number and _bits(tree) > LARGEST_BITS:
            raise TooLarge(type(tree).__name__)


def _bits(number: Any) -> float:
    """About how many bits an exact number has above or below its point; a bound, found without evaluating it."""
    if number.is_Rational:
        return float(max(int(number.p).bit_length(), int(number.q).bit_length()))
    if isinstance(number, sympy.Pow):
        return _bits(number.base) * _size(number.exp)
    if isinstance(number, sympy.exp):
        return 1.5 * _size(number.args[0])
    if isinstance(number, sympy.factorial):
        n = _size(number.args[0])
        return n * max(1.0, math.log2(n + 1))
    if isinstance(number, sympy.Add | sympy.Mul):
        return float(sum(_bits(part) for part in number.args))
    return 16.0


def _size(number: Any) -> float:
    """The absolute value of a number that is used as an exponent; TooLarge if it has no business there."""
    if _bits(number) > 64:
        raise TooLarge("exponent")
    value = number.evalf(8)
    return abs(complex(value)) if value.is_number else 1.0


def _same_value(gold: Any, answer: Any, gold_number: Number | None, answer_number: Number | None) -> bool | None:
    gold, answer = _exact(gold), _exact(answer)
    if bool(gold.free_symbols) != bool(answer.free_symbols):
        # x - x + 5 is 5; but a variable that does not cancel is another answer.
        gold, answer = sympy.simplify(gold), sympy.simplify(answer)
    if gold.free_symbols != answer.free_symbols:
        return False
    rounded = _rounded(gold, answer, gold_number, answer_number)
    if rounded is not None:
        return rounded
    if _differ(gold, answer):
        return False
    # From the cheapest proof to the most expensive. math-verify's numeric check is left out: it takes 1e-20 for zero.
    return sympy.expand(gold - answer) == 0 or sympy_symbolic_eq(gold, answer) or _vanishes(gold - answer)


def _exact(tree: Any) -> Any:
    """With each decimal as the fraction it writes, not the float nearest to it; values are then evaluated."""
    tree = tree.xreplace({f: sympy.Rational(str(f)) for f in tree.atoms(sympy.Float)})
    return tree.doit() if _is_value(tree) else tree


def _rounded(gold: Any, answer: Any, gold_number: Number | None, answer_number: Number | None) -> bool | None:
    """Rationals exactly; a decimal against π or a root by our rounding rule; None if neither applies."""
    if gold.is_Rational and answer.is_Rational:
        return same_number(gold_number or Number(_fraction(gold)), answer_number or Number(_fraction(answer)))
    if gold.free_symbols or not (gold.is_Rational or answer.is_Rational):
        return None
    number, real = (gold_number, answer) if gold.is_Rational else (answer_number, gold)
    if number is None or number.decimals is None or number.digits < ROUNDED_GOLD_DIGITS or not real.is_real:
        return None
    near = Number(_fraction(sympy.Rational(str(sympy.N(real, number.digits + 25)))))
    return same_number(number, near) if gold.is_Rational else same_number(near, number)


def _fraction(rational: Any) -> Fraction:
    return Fraction(int(rational.p), int(rational.q))


def _differ(gold: Any, answer: Any) -> bool:
    """Whether the two are certainly different at some trial point, by their relative distance."""
    if gold.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit) or answer.has(
        sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit
    ):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for turn in range(len(_POINTS) if symbols else 1):
        at = {s: sympy.Rational(_POINTS[(turn + i) % len(_POINTS)]) + i for i, s in enumerate(symbols)}
        there, given = (tree.subs(at).evalf(_DIGITS + 10) for tree in (gold, answer))
        if any(not value.is_number or value.has(sympy.nan, sympy.zoo) for value in (there, given)):
            continue
        if not (there.is_finite and given.is_finite):
            continue
        distance, scale = abs((there - given).evalf(_DIGITS)), max(abs(there).evalf(15), abs(given).evalf(15))
        if distance > scale * sympy.Float(10) ** (10 - _DIGITS):
            return True
    return False


def _vanishes(difference: Any) -> bool | None:
    """Whether a difference is zero by proof; None if sympy can prove neither."""
    zero = difference.equals(0)
    return None if zero is None else bool(zero)


def _graded(gold: Any, answer: Any) -> bool:
    """math-verify's own verdict."""
    return bool(
        verify(gold, answer, float_rounding=12, strict=True, allow_set_relation_comp=True, timeout_seconds=None)
    )
