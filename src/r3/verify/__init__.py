"""Right or wrong, safely: a maths verifier that cannot be hung or fooled, and the same protocol for any function.

Importing this costs neither torch nor sympy: sympy is loaded in the workers, when an answer first needs it.
"""

from __future__ import annotations

from r3.verify.base import Case, Verdict, Verifier, VerifierError
from r3.verify.code import CodeVerifier
from r3.verify.functions import FunctionVerifier
from r3.verify.maths import MathSettings, MathVerifier

__all__ = [
    "Case",
    "CodeVerifier",
    "FunctionVerifier",
    "MathSettings",
    "MathVerifier",
    "Verdict",
    "Verifier",
    "VerifierError",
]
