"""What a task's written solution gives: a right answer in full, and hints that are more and more of its first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from r3.samples import Query

LEVELS = 3
"""How many hints are made of a solution that has steps enough."""


def written(query: Query) -> str | None:
    r"""What a right answer looks like: the column `response` as it is, or `solution` with the answer in a box.

    >>> written(Query("q", "2+3?", "5", {"solution": "2 + 3 = 5"}))
    '2 + 3 = 5\n\\boxed{5}'
    """
    if query.columns.get("response"):
        return str(query.columns["response"])
    if not query.columns.get("solution"):
        return None
    solution = str(query.columns["solution"])
    return solution if "\\boxed{" in solution else f"{solution}\n\\boxed{{{query.answer}}}"


def first_steps(steps: Sequence[str], joint: str = "\n") -> tuple[str, ...]:
    """About a quarter of the steps, half and three quarters of them, each hint whole by itself; of few steps, fewer.

    >>> first_steps(["a", "b", "c", "d", "e"], "")
    ('ab', 'abc', 'abcd')
    >>> first_steps(["a", "b"], "")
    ('a', 'ab')
    """
    shown = dict.fromkeys(-(-level * len(steps) // (LEVELS + 1)) for level in range(1, LEVELS + 1))
    return tuple(joint.join(steps[:count]) for count in shown if count)


def helped(query: Query) -> Query:
    """The query with its written solution as demonstration, and the solution's first lines as hints."""
    lines = str(query.columns.get("solution", "")).splitlines()
    return replace(query, demonstration=written(query) or "", hints=first_steps(lines))
