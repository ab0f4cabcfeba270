"""Right or wrong, safely: one protocol (`Judge`) for maths, code, any function, and rewards made of several.

Importing this costs neither torch nor sympy: sympy is loaded in the workers, when an answer first needs it.
"""

from __future__ import annotations

from r3.verify.code import CodeVerifier
from r3.verify.functions import FunctionJudge
from r3.verify.judge import Case, Judge, Verdict, VerifierError
from r3.verify.maths import MathSettings, MathVerifier
from r3.verify.rewards import Reward, RewardsJudge

__all__ = [
    "Case",
    "CodeVerifier",
    "FunctionJudge",
    "Judge",
    "MathSettings",
    "MathVerifier",
    "Reward",
    "RewardsJudge",
    "Verdict",
    "VerifierError",
]
