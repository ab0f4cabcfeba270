"""A reward made of several functions: one says right or wrong, the others shape what the answer is worth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from r3.verify.functions import ScoreFunction, verdict_of
from r3.verify.judge import Judge, Verdict, VerifierError
from r3.verify.maths import boxed_answer

if TYPE_CHECKING:
    from r3.samples import Query

CORRECT = "correct"
"""The built-in reward that is the task's own judge: 1 for a right answer, else 0 (graded code: the share of tests)."""


def boxed(completion: str) -> float:
    r"""1 if the answer ends in a \boxed{} that can be read, whatever stands in it.

    >>> boxed(r"so \boxed{4}"), boxed("so 4"), boxed(r"so \boxed{4")
    (1.0, 0.0, 0.0)
    """
    return float(not boxed_answer(completion).reason)


def think(completion: str) -> float:
    """1 if the answer is one thought, closed by </think>, and something behind it; the prompt may open the thought.

    >>> think("<think>2+2</think> 4"), think("2+2</think> 4"), think("4"), think("<think>2+2</think> ")
    (1.0, 1.0, 0.0, 0.0)
    """
    thought, closed, said = completion.strip().removeprefix("<think>").partition("</think>")
    once = "<think>" not in thought + said and "</think>" not in said
    return float(bool(closed and said.strip()) and once)


BUILT_IN: dict[str, Callable[..., float]] = {"boxed": boxed, "think": think}


@dataclass(frozen=True, slots=True)
class Reward:
    """One function of a reward."""

    function: str | Callable[..., Any]
    """Its dotted path, the name of a built-in one, or the function itself."""
    name: str = ""
    """What it is logged as; by default the last part of its path."""
    weight: float = 1.0
    truncated: Literal["skip", "judge"] = "skip"
    """Whether answers that the length limit cut are scored too."""
    caged: bool = False

    @property
    def called(self) -> str:
        if self.name:
            return self.name
        path = self.function if isinstance(self.function, str) else getattr(self.function, "__name__", "")
        return path.rpartition(".")[2] or type(self.function).__name__


@dataclass(frozen=True, slots=True)
class _Scored:
    """What one function said of an answer: its value (None: it abstains), and its verdict if it is the outcome."""

    value: float | None
    verdict: Verdict
    failed: bool = False


class RewardsJudge:
    """The judge over several functions. `outcome` names the one that says right or wrong, above `right_above`."""

    def __init__(
        self, rewards: Sequence[Reward], *, correct: Judge, outcome: str | None = None, right_above: float = 0.5
    ) -> None:
        names = [reward.called for reward in rewards]
        if outcome is None and len(names) != 1:
            raise VerifierError(f"of several rewards one is the outcome: set task.outcome to one of {', '.join(names)}")
        self.outcome = names[0] if outcome is None else outcome
        if self.outcome not in names or len(set(names)) < len(names):
            raise VerifierError(
                f"task.outcome={self.outcome} must be one of {', '.join(names)}, and each name must be there once"
            )
        self.rewards = tuple(rewards)
        self._right_above = right_above
        self._correct = correct
        self._functions = {reward.called: _function(reward) for reward in rewards if reward.function != CORRECT}

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        started = time.perf_counter()
        verdict = Verdict(False, "truncated" if truncated else "abstained")
        scores: dict[str, float] = {}
        failed = []
        for reward in self.rewards:
            if truncated and reward.truncated == "skip":
                continue
            scored = self._scored(reward, query, text, truncated)
            if scored.value is not None:
                scores[reward.called] = reward.weight * scored.value
            if scored.failed:
                failed.append(reward.called)
            if reward.called == self.outcome and not truncated:
                verdict = scored.verdict
        seconds = time.perf_counter() - started
        return Verdict(verdict.right, verdict.reason, seconds, verdict.feedback, scores, tuple(failed))

    def close(self) -> None:
        for function in self._functions.values():
            function.close()
        self._correct.close()

    def _scored(self, reward: Reward, query: Query, text: str, truncated: bool) -> _Scored:
        if reward.function == CORRECT:
            verdict = self._correct.judge(query, text, truncated=truncated)
            value = float(verdict.right) if verdict.scores is None else sum(verdict.scores.values())
            return _Scored(value, verdict)
        score = self._functions[reward.called](query, text, truncated=truncated)
        return _Scored(score.value, verdict_of(score, self._right_above), bool(score.failed))


def _function(reward: Reward) -> ScoreFunction:
    setting = "caged: true for it in task.rewards"
    if not isinstance(reward.function, str) or "." in reward.function:
        return ScoreFunction(reward.function, caged=reward.caged, setting=setting)
    if reward.function not in BUILT_IN:
        raise VerifierError(
            f"task.rewards: no built-in reward {reward.function!r}; there are {', '.join([CORRECT, *BUILT_IN])}, or "
            "write package.module.function"
        )
    return ScoreFunction(f"{__name__}.{reward.function}", caged=reward.caged, setting=setting)


class OutcomeWatch:
    """Says once if all answers are wrong by the threshold although their rewards differ."""

    BATCHES = 10
    """Speak after this many batches without a right answer."""

    def __init__(self, name: str, right_above: float, *, threshold: str, outcome: str) -> None:
        self.name, self.right_above = name, right_above
        self._threshold, self._outcome = threshold, outcome  # what the settings are called where it watches
        self._batches = self._answers = 0
        self._done = self._vary = False
        self._low, self._high = math.inf, -math.inf

    def see(self, outcomes: Sequence[float], rewards: Sequence[float], right: Sequence[bool]) -> str | None:
        """A batch: the outcome function's values, the whole rewards, what counted as right; a warning if it is time."""
        self._done = self._done or any(right)
        if self._done or not outcomes:
            return None
        self._batches, self._answers = self._batches + 1, self._answers + len(outcomes)
        self._low, self._high = min(self._low, *outcomes), max(self._high, *outcomes)
        self._vary = self._vary or len(set(rewards)) > 1 or len(set(outcomes)) > 1
        if self._batches < self.BATCHES or not self._vary:
            return None
        self._done = True
        return (
            f"none of {self._answers} answers in {self._batches} batches was right, though their rewards differ: "
            f"{self.name!r} gave {self._low:g} to {self._high:g}, and right is above {self._threshold}="
            f"{self.right_above:g}; lower that, or name another function in {self._outcome}"
        )
