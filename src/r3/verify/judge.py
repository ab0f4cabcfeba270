"""What a judge is: from a query and an answer to right or wrong, why, and what the answer is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from r3.errors import BAD_INPUT, R3Error

if TYPE_CHECKING:
    from r3.samples import Query


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right or wrong, why (a short word of a fixed vocabulary, fit to be counted), and the seconds it took."""

    right: bool
    reason: str
    seconds: float = 0.0
    feedback: str = ""
    """What went wrong, for a reader: the failing test of a program, say. May be shown to the model in a reflection."""
    scores: Mapping[str, float] | None = None
    """What the answer's reward is the sum of, by name; None leaves it to the method's own reward for right or wrong."""
    failed: tuple[str, ...] = ()
    """The scores that are 0 because their function failed in its cage."""

    @property
    def text(self) -> str:
        """The reason and, on the lines after it, the feedback, as a sample keeps them."""
        return f"{self.reason}\n{self.feedback}" if self.feedback else self.reason


TRUNCATED = Verdict(False, "truncated")


class VerifierError(R3Error, RuntimeError):
    """A judge that cannot work at all; the message names the fix. A bad answer is a verdict, never an error."""

    exit_code = BAD_INPUT


class Judge(Protocol):
    """Decides whether an answer to a query is right. Safe to call from several threads at once."""

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        """The verdict on one answer. One that the length limit cut is never right, whatever it holds."""
        ...

    def close(self) -> None:
        """End workers, if there are any."""
        ...


@dataclass(frozen=True, slots=True)
class PlainJudge:
    """A judge that is a pure function of the query and a whole answer."""

    decide: Callable[[Query, str], Verdict]

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        return TRUNCATED if truncated else self.decide(query, text)

    def close(self) -> None:
        """Nothing to end."""


class Case(NamedTuple):
    """One completion to judge against its reference answer."""

    completion: str
    gold: str
    truncated: bool = False
