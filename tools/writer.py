"""The writer that the bundled model was warm-started on: it knows the procedure, and is careless on purpose.

It drops carries (12+8=10), miscounts, and re-checks steps (12+8=10?12+8=20); a rambler re-checks again and again until
the length limit cuts it. A model that learnt from such working knows the right procedure and the bad habits alike, and
reinforcement has to tell them apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from r3.tasks.arithmetic import Problem


@dataclass(frozen=True)
class Habits:
    """How the warm-start writer errs and rambles. All are probabilities.

    drop_carry: of forgetting each single carry; miscount: of a step's result being one off; recheck: of repeating a
    step before going on; rambler: of a response being a rambler's, who repeats a step with probability rambler_recheck
    each time.
    """

    drop_carry: float = 0.65
    miscount: float = 0.02
    recheck: float = 0.05
    rambler: float = 0.15
    rambler_recheck: float = 0.6


CAREFUL = Habits(drop_carry=0.0, miscount=0.0, recheck=0.0, rambler=0.0)


def careless_sum(left: int, right: int, rng: random.Random, habits: Habits) -> int:
    """Add column by column, dropping carries and miscounting as the habits say.

    >>> careless_sum(27, 15, random.Random(0), CAREFUL)
    42
    >>> careless_sum(27, 15, random.Random(0), Habits(drop_carry=1.0, miscount=0.0))
    32
    """
    total, place, carry = 0, 1, 0
    while left or right or carry:
        column = left % 10 + right % 10 + carry
        total += column % 10 * place
        carry = column // 10
        if carry and rng.random() < habits.drop_carry:
            carry = 0
        left, right, place = left // 10, right // 10, place * 10
    if rng.random() < habits.miscount:
        total += rng.choice((-1, 1))
    return max(total, 0)


def write_working(problem: Problem, rng: random.Random, habits: Habits) -> str:
    """Write one response the way a writer with these habits would. A slip carries on into the later totals.

    >>> write_working(Problem((7, 5, 8)), random.Random(0), CAREFUL)
    '7+5=12+8=20#20'
    """
    recheck = habits.rambler_recheck if rng.random() < habits.rambler else habits.recheck
    total = problem.terms[0]
    parts = [str(total)]
    for term in problem.terms[1:]:
        result = careless_sum(total, term, rng, habits)
        parts.append(f"+{term}={result}")
        while rng.random() < recheck:
            result = careless_sum(total, term, rng, habits)
            parts.append(f"?{total}+{term}={result}")
        total = result
    return "".join(parts) + f"#{total}"
