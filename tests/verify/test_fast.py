"""The fast path: exact, and wrong only when certain.

Covers r3.verify.maths, r3.verify.canonical, r3.verify.equality, r3.verify.quantities, r3.verify.outline.
"""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from r3.verify import equality
from r3.verify.canonical import canonical
from r3.verify.maths import boxed_answer
from r3.verify.quantities import read_number

fractions = st.fractions(max_denominator=10**6)


@given(fractions, fractions)
def test_fractions_are_equal_exactly_when_they_are(one: Fraction, other: Fraction) -> None:
    sign = "-" if one < 0 else ""
    written = rf"{sign}\frac{{{abs(one.numerator)}}}{{{one.denominator}}}"
    assert equality.decide(written, f"{other.numerator}/{other.denominator}") == (one == other)
    assert equality.decide(written, f"{one.numerator}/{one.denominator}") is True


@given(st.integers(min_value=0, max_value=10**40), st.integers(min_value=0, max_value=30))
def test_decimals_are_read_exactly(digits: int, places: int) -> None:
    text = f"{digits:0{places + 1}d}"
    written = f"{text[: len(text) - places]}.{text[len(text) - places :]}" if places else text
    number = read_number(written)
    assert number is not None
    assert number.value == Fraction(digits, 10**places)


@given(st.integers(min_value=1000, max_value=10**30))
def test_thousands_separators_change_nothing(value: int) -> None:
    for separator in (",", "{,}", r",\!", r"{,}\!"):
        assert equality.decide(str(value), f"{value:,}".replace(",", separator)) is True


@given(st.text(max_size=300))
def test_any_text_can_be_asked_about(text: str) -> None:
    assert equality.decide(text, text) in (True, False, None)
    assert equality.decide("5", text) in (True, False, None)
    boxed_answer(text)


@given(st.text(alphabet=r"\{}()[],;=+-*/^_$%.0123456789 axfrctqspim&|<>!~", max_size=120))
def test_latex_like_noise_can_be_asked_about(text: str) -> None:
    assert equality.decide(text, "x^2+1") in (True, False, None)
    assert canonical(canonical(text)) is not None


@given(st.text(max_size=50), st.text(alphabet="0123456789+-x ", min_size=1, max_size=20))
def test_the_box_is_what_stands_last(before: str, answer: str) -> None:
    extract = boxed_answer(rf"{before} \boxed{{{answer}}}")
    assert extract.answer == answer or (not answer.strip() and extract.reason == "empty box")
