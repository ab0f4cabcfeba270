"""What a hole in the parser would do: hand text to sympy, in a worker that has judged before."""

from __future__ import annotations

import sympy

from r3.verify import symbolic


def evaluate(text: str) -> str:
    symbolic.decide("x+1", "1+x+0")
    return str(sympy.sympify(text))
