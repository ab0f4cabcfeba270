"""Any function as a verifier: f(completion, **columns) → float or bool, sync or async, in this process or caged."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from r3.verify.base import Case, Verdict, VerifierError
from r3.verify.cage import Answer, Cage, CageSettings
from r3.verify.forkserver import target


class FunctionVerifier:
    """The verifier protocol over a function of the user's, named by its dotted path.

    It gets the completion and the columns of its query; the reference answer is the column `answer`. A value above
    `threshold` is right. In this process what the function raises reaches the caller; in the cage it is the verdict
    "error", and a case that hangs, bloats or crashes is "timeout", "memory" or "crashed", each counted.
    """

    def __init__(
        self,
        dotted: str,
        *,
        caged: bool = False,
        threshold: float = 0.5,
        workers: int = 2,
        seconds: float = 2.0,
        memory_mb: int = 4096,
    ) -> None:
        self.dotted, self.caged, self.threshold = dotted, caged, threshold
        # A user's judge may need files and the network; its module may start threads, so it is loaded after the fork.
        self._cage_settings = CageSettings(
            dotted, workers=workers, seconds=seconds, memory_mb=memory_mb, sealed=False, preload=False
        )
        self._function = self._imported()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._cage: Cage | None = None
        self._owner = os.getpid()

    def verify(
        self, completion: str, gold: str = "", *, truncated: bool = False, columns: Mapping[str, Any] | None = None
    ) -> Verdict:
        return self.verify_many([Case(completion, gold, truncated)], [columns or {}])[0]

    def verify_many(
        self, cases: Iterable[Case | tuple[str, str]], columns: Iterable[Mapping[str, Any]] | None = None
    ) -> list[Verdict]:
        """The verdicts in order; `columns` holds each case's other columns."""
        listed = [case if isinstance(case, Case) else Case(*case) for case in cases]
        others = list(columns) if columns is not None else [{} for _ in listed]
        calls = [
            {"args": [case.completion], "kwargs": {**dict(other), "answer": case.gold}}
            for case, other in zip(listed, others, strict=True)
            if not case.truncated
        ]
        answers = iter(self._in_cage(calls) if self.caged else self._in_process(calls))
        verdicts = [Verdict(False, "truncated") if case.truncated else self._verdict(next(answers)) for case in listed]
        with self._lock:
            self._counts.update(verdict.reason for verdict in verdicts)
        return verdicts

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        with self._lock:
            cage, self._cage = self._cage, None
        if cage is not None and self._owner == os.getpid():
            cage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        s = self._cage_settings
        options = {"caged": self.caged, "threshold": self.threshold}
        return _again, (self.dotted, {**options, "workers": s.workers, "seconds": s.seconds, "memory_mb": s.memory_mb})

    def _imported(self) -> Callable[..., Any]:
        try:
            return target(self.dotted)
        except (ImportError, AttributeError, ValueError, AssertionError) as error:
            raise VerifierError(
                f"{self.dotted}: cannot import it ({error}); write package.module.function, of a function "
                "f(completion, **columns) → float or bool"
            ) from error

    def _in_process(self, calls: list[dict[str, Any]]) -> list[Answer]:
        if inspect.iscoroutinefunction(self._function):
            return _finished(self._all(calls))
        answers = []
        for call in calls:
            started = time.perf_counter()
            result = self._function(*call["args"], **call["kwargs"])
            answers.append(Answer(result, seconds=time.perf_counter() - started))
        return answers

    async def _all(self, calls: list[dict[str, Any]]) -> list[Answer]:
        async def one(call: dict[str, Any]) -> Answer:
            started = time.perf_counter()
            result = await self._function(*call["args"], **call["kwargs"])
            return Answer(result, seconds=time.perf_counter() - started)

        return list(await asyncio.gather(*map(one, calls)))

    def _in_cage(self, calls: list[dict[str, Any]]) -> list[Answer]:
        with self._lock:
            if self._owner != os.getpid():  # a forked child leaves its parent's workers alone
                self._cage, self._owner = None, os.getpid()
            if self._cage is None:
                self._cage = Cage(self._cage_settings)
            cage = self._cage
        return [future.result() for future in cage.submit(calls)]

    def _verdict(self, answer: Answer) -> Verdict:
        if answer.failed:
            return Verdict(False, answer.failed, answer.seconds)
        try:
            value = float(answer.result)
        except (TypeError, ValueError, OverflowError) as error:
            if self.caged:  # what runs in the cage may be anything; it must not end the run
                return Verdict(False, "error", answer.seconds)
            raise VerifierError(
                f"{self.dotted} gave {type(answer.result).__name__}; it must give a float or a bool"
            ) from error
        if math.isnan(value):
            return Verdict(False, "not a number", answer.seconds)
        right = value > self.threshold
        return Verdict(right, "match" if right else "different", answer.seconds)


def _again(dotted: str, options: dict[str, Any]) -> FunctionVerifier:
    return FunctionVerifier(dotted, **options)


def _finished(answers: Coroutine[Any, Any, list[Answer]]) -> list[Answer]:
    """Run to the end, also from a thread that already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(answers)
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(asyncio.run, answers).result()
