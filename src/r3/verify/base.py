"""What a verifier is: a completion and a reference answer in, right or wrong and why out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from r3.errors import BAD_INPUT, R3Error


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right or wrong, why (a short word of a fixed vocabulary, fit to be counted), and the seconds it took."""

    right: bool
    reason: str
    seconds: float = 0.0
    feedback: str = ""
    """What went wrong, for a reader: the failing test of a program, say. May be shown to the model in a reflection."""
    share: float | None = None
    """The share of the tests that passed, where there are several and all were run."""

    @property
    def text(self) -> str:
        """The reason and, on the lines behind it, the feedback: what a sample keeps."""
        return f"{self.reason}\n{self.feedback}" if self.feedback else self.reason


class Case(NamedTuple):
    """One completion to judge against its reference answer."""

    completion: str
    gold: str
    truncated: bool = False


class VerifierError(R3Error, RuntimeError):
    """A verifier that cannot work at all; the message names the fix. A bad answer is a verdict, never an error."""

    exit_code = BAD_INPUT


class Verifier(Protocol):
    """Judges completions. Safe to call from several threads at once."""

    def verify(self, completion: str, gold: str, *, truncated: bool = False) -> Verdict: ...

    def verify_many(self, cases: Iterable[Case | tuple[str, str]]) -> list[Verdict]:
        """The verdicts in the order of the cases."""
        ...

    def counts(self) -> Mapping[str, int]:
        """How many verdicts had each reason so far, for the metrics."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
