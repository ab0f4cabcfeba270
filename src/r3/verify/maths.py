r"""The maths verifier: our policy of what counts as the answer, the fast path, and math-verify in a cage for the rest.

What counts as the answer, and what is refused unread. `docs/verifier.md` states the policy with examples.

>>> boxed_answer(r"<think>\boxed{3}</think> So \boxed{\frac{1}{2}}.")
Extract(answer='\\frac{1}{2}', reason='')
>>> boxed_answer("four").reason, boxed_answer(r"\boxed{4").reason, boxed_answer(r"\boxed{ }").reason
('no box', 'unclosed box', 'empty box')
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from r3.verify import equality
from r3.verify.cage import Answer, Cage, CageSettings
from r3.verify.judge import Case, Verdict

if TYPE_CHECKING:
    from r3.samples import Query

LONGEST_ANSWER = 2_000
LONGEST_GOLD = 4_000
DEEPEST_NESTING = 40
_MENTIONS = 64  # how many \boxed without a brace to skip before giving up
_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")
_THINK_END = "</think>"
_BLANKS = "\t\r\n\u200b\u200c\u200d\u2060\ufeff\u00ad\u00a0\u2009\u202f\u2002\u2003"


class Extract(NamedTuple):
    """The text in the box, or "" and the reason why there is none."""

    answer: str
    reason: str = ""


def boxed_answer(completion: str) -> Extract:
    r"""What the last \boxed{} holds: of the text after the last </think> if a box stands there, else of the whole."""
    end_of_thought = completion.rfind(_THINK_END)
    if end_of_thought >= 0 and (start := _last_box(completion, end_of_thought)) is not None:
        return _contents(completion, start)
    start = _last_box(completion, 0)
    return Extract("", "no box") if start is None else _contents(completion, start)


def _last_box(text: str, after: int) -> int | None:
    r"""Where the contents of the last \boxed{ begin, searched from the end so that long texts cost nothing."""
    end = len(text)
    for _ in range(_MENTIONS):
        start = text.rfind("\\boxed", after, end)
        if start < 0:
            return None
        if match := _BOX.match(text, start):
            return match.end()
        end = start
    return None


def _contents(text: str, start: int) -> Extract:
    window = text[start : start + LONGEST_ANSWER + 1]
    depth = 1
    for match in _BRACE.finditer(window):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            answer = window[: match.start()]
            return Extract(answer) if answer.strip(" \t\r\n$") else Extract("", "empty box")
    return Extract("", "too long" if len(window) > LONGEST_ANSWER else "unclosed box")


def bare_gold(gold: str) -> str:
    r"""A reference answer without the box that some data sets leave around it; "" if there is none."""
    if "\\boxed" not in gold:
        return gold if gold.strip(" \t\r\n$") else ""
    return boxed_answer(gold).answer


def refusal(answer: str) -> str:
    """Why a text is refused without reading it, or "": answers are short and flat, hostile texts need not be."""
    if len(answer) > LONGEST_ANSWER:
        return "too long"
    depth = deepest = 0
    for match in _BRACKET.finditer(answer):
        depth += 1 if match[0] in "([{" else -1
        deepest = max(deepest, depth)
    if deepest > DEEPEST_NESTING:
        return "too deep"
    if any(not character.isprintable() and character not in _BLANKS for character in answer):
        return "unreadable"  # control characters, lone surrogates, changes of direction
    return ""


# Judged once before the first worker is forked: the parser's tables and sympy's late imports are then shared.
_WARM_UP = (
    ("x^2+2x+1", "(x+1)^2"), ("x<1", "-x>-1"), ("0<x<1", "(0,1)"), (r"\sqrt{8}+\pi", r"2\sqrt{2}+\pi"),
    ("1+2i", "1-2i"),
    (r"\tan^2(y)+1", r"\sec^2(y)"), ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"), (r"\log_2(8)", "3"),
    (r"(2,12)\cup(12,102)", r"(12,102)\cup(2,12)"),
    (r"\begin{pmatrix}x\end{pmatrix}", r"\begin{pmatrix}2x\end{pmatrix}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\frac{\sqrt{a+b}}{x_1}", r"\sqrt{a+b}/x_1"), (r"|x|", r"\sqrt{x^2}"),
)  # fmt: skip
_TARGET = "r3.verify.symbolic.decide"
_PASSING = {
    "timeout",
    "memory",
    "processes",
    "crashed",
    "error",
}  # may differ on a quieter machine: not cached


@dataclass(frozen=True, slots=True)
class MathSettings:
    """Limits of the symbolic path. The policy itself has no settings, so that everyone has the same grader."""

    workers: int = 2
    seconds: float = 1.0
    memory_mb: int = 1024
    remembered: int = 65_536  # verdicts kept: the responses of a group often end in the same answer; 0 for none


class MathVerifier:
    """Judges boxed answers (docs/verifier.md). Any thread may use it; forked or pickled, it starts its own cage."""

    def __init__(self, settings: MathSettings | None = None) -> None:
        self.settings = settings or MathSettings()
        self._cage_settings = CageSettings(
            _TARGET,
            workers=self.settings.workers,
            seconds=self.settings.seconds,
            memory_mb=self.settings.memory_mb,
            warm_up=tuple({"args": pair, "kwargs": {}} for pair in _WARM_UP),
        )
        self._state = _State()

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        return self.verify(text, query.answer, truncated=truncated)

    def verify(self, completion: str, gold: str, *, truncated: bool = False) -> Verdict:
        """The same where there is no query, only a reference answer."""
        return self.verify_many([Case(completion, gold, truncated)])[0]

    def verify_many(self, cases: Iterable[Case | tuple[str, str]]) -> list[Verdict]:
        state = self._here()
        verdicts: list[Verdict | None] = []
        asked: dict[tuple[str, str], list[int]] = {}
        waiting: dict[tuple[str, str], Future[Answer]] = {}
        for index, case in enumerate(map(_case, cases)):
            verdict = _at_once(case, state)
            verdicts.append(verdict if isinstance(verdict, Verdict) else None)
            if isinstance(verdict, tuple):  # ask now: workers compute while the fast path goes on
                if verdict not in asked:
                    waiting[verdict] = self._ask(state, verdict)
                asked.setdefault(verdict, []).append(index)
        for pair, indices in asked.items():
            verdict = _from_worker(waiting[pair].result())
            if verdict.reason not in _PASSING:
                state.remember(pair, verdict, self.settings.remembered)
            for index in indices:
                verdicts[index] = verdict
        done = [verdict for verdict in verdicts if verdict is not None]
        state.count(done)
        return done

    def counts(self) -> Mapping[str, int]:
        """How many verdicts of this process had each reason."""
        return self._here().counted()

    def warm(self) -> Self:
        """Start the workers now rather than at the first answer that needs them."""
        state = self._here()
        for future in [self._ask(state, ("x", "x+1")) for _ in range(self.settings.workers)]:
            future.result()
        return self

    def close(self) -> None:
        self._here().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return MathVerifier, (self.settings,)

    def _here(self) -> _State:
        """This process's state: a forked child must not touch its parent's workers, nor wait for its locks."""
        if self._state.owner != os.getpid():
            self._state = _State()
        return self._state

    def _ask(self, state: _State, pair: tuple[str, str]) -> Future[Answer]:
        return state.cage(self, self._cage_settings).submit([{"args": pair, "kwargs": {}}])[0]


class _State:
    """The state of one process: the cage, cached verdicts, counts."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._cage: Cage | None = None
        self._remembered: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def cage(self, verifier: MathVerifier, settings: CageSettings) -> Cage:
        with self._lock:
            if self._cage is None:
                self._cage = Cage(settings)
                weakref.finalize(verifier, _close, self._cage, self.owner)
            return self._cage

    def recall(self, pair: tuple[str, str]) -> Verdict | None:
        with self._lock:
            if (verdict := self._remembered.get(pair)) is not None:
                self._remembered.move_to_end(pair)
            return verdict

    def remember(self, pair: tuple[str, str], verdict: Verdict, limit: int) -> None:
        with self._lock:
            self._remembered[pair] = replace(verdict, seconds=0.0)
            while len(self._remembered) > limit:
                self._remembered.popitem(last=False)

    def count(self, verdicts: Iterable[Verdict]) -> None:
        with self._lock:
            self._counts.update(verdict.reason for verdict in verdicts)

    def counted(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        with self._lock:
            cage, self._cage = self._cage, None
        if cage is not None:
            cage.close()


def _close(cage: Cage, owner: int) -> None:
    if os.getpid() == owner:
        cage.close()


def _case(case: Case | tuple[str, str]) -> Case:
    return case if isinstance(case, Case) else Case(*case)


def _at_once(case: Case, state: _State) -> Verdict | tuple[str, str]:
    """A verdict from the policy, the fast path or memory; else the (gold, answer) that only a worker can judge."""
    started = time.perf_counter()

    def verdict(right: bool, reason: str) -> Verdict:
        return Verdict(right, reason, time.perf_counter() - started)

    if case.truncated:
        return verdict(False, "truncated")
    extract = boxed_answer(case.completion)
    if reason := extract.reason or refusal(extract.answer):
        return verdict(False, reason)
    gold = bare_gold(case.gold)
    if not gold or len(gold) > LONGEST_GOLD or refusal(gold):
        return verdict(False, "bad gold")
    right = equality.decide(gold, extract.answer)
    if right is not None:
        return verdict(right, "match" if right else "different")
    return state.recall((gold, extract.answer)) or (gold, extract.answer)


def _from_worker(answer: Answer) -> Verdict:
    if answer.failed:
        return Verdict(False, answer.failed, answer.seconds)
    match answer.result:
        case [bool(right), str(reason)]:
            return Verdict(right, reason, answer.seconds)
    return Verdict(False, "error", answer.seconds)
