"""Any function as a score of answers: f(completion, **columns) → float, bool or None, in this process or caged.

A function with a parameter `completions` is called as TRL calls its reward functions: every argument by name and as a
list, here of one element, since an answer is judged as soon as it is finished. Any other gets one completion. Both get
the columns of the query's row that they have parameters for, or all of them where they take `**columns`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from r3.verify.cage import Cage, CageSettings
from r3.verify.forkserver import target
from r3.verify.judge import TRUNCATED, Verdict, VerifierError

if TYPE_CHECKING:
    from r3.samples import Query


class Score(NamedTuple):
    """What a function says of an answer."""

    value: float | None
    """None: it abstains."""
    failed: str = ""
    """Caged functions: how it failed (timeout, memory, crashed, error, not a number); its value is then 0."""
    seconds: float = 0.0


def importable(folders: Sequence[str | Path]) -> None:
    """Let functions be imported from these folders too. What is importable already stays what it was."""
    for folder in (os.path.abspath(folder) for folder in folders):
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()


def digest_of_source(dotted: str) -> str | None:
    """What the file of a function's module holds now; None where it has none. What it imports is not looked at."""
    module = sys.modules.get(dotted.rpartition(".")[0])
    path = getattr(module, "__file__", None)
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() if path else None
    except OSError:
        return None


class ScoreFunction:
    """A function of the user's, named by its dotted path or given as an object. Any thread may call it.

    In this process, what the function raises ends the run with an error that names it; in the cage it is a failure to
    count, as are hanging, bloating and crashing.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        caged: bool = False,
        setting: str = "caged=true",
        workers: int = 2,
        seconds: float = 2.0,
        memory_mb: int = 4096,
    ) -> None:
        self.name = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._setting = setting
        if caged and not isinstance(function, str):
            raise VerifierError(
                f"{self.name}: only a function named by its dotted path can be caged, since it is loaded in a process "
                "of its own"
            )
        self._function = _imported(function) if isinstance(function, str) else function
        self._parameters = _parameters(self._function)
        # A user's judge may need files and the network; its module may start threads, so it is loaded after the fork.
        self._cage_settings = CageSettings(
            self.name, workers=workers, seconds=seconds, memory_mb=memory_mb, sealed=False, preload=False
        )
        self.caged = caged
        self._lock = threading.Lock()
        self._cage: Cage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = os.getpid()

    def __call__(self, query: Query, text: str, *, truncated: bool = False) -> Score:
        positional, named = self._arguments(query, text, truncated)
        started = time.perf_counter()
        if self.caged:
            answer = self._started_cage().submit([{"args": positional, "kwargs": named}])[0].result()
            if answer.failed:
                return Score(0.0, answer.failed, answer.seconds)
            result = answer.result
        else:
            result = self._called(query, positional, named)
        try:
            value = self._value(result)
        except (TypeError, ValueError, OverflowError) as error:
            if self.caged:  # what runs in the cage may be anything; it must not end the run
                return Score(0.0, "error", time.perf_counter() - started)
            raise VerifierError(f"{self.name}, on query {query.id!r}: {error}") from error
        if value is not None and not math.isfinite(value):
            if self.caged:
                return Score(0.0, "not a number", time.perf_counter() - started)
            raise VerifierError(
                f"{self.name} gave {value} on query {query.id!r}; return a finite number, or None to abstain"
            )
        return Score(value, seconds=time.perf_counter() - started)

    def close(self) -> None:
        with self._lock:
            cage, self._cage, loop, self._loop = self._cage, None, self._loop, None
        if self._owner != os.getpid():
            return
        if cage is not None:
            cage.close()
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        s = self._cage_settings
        limits = {"workers": s.workers, "seconds": s.seconds, "memory_mb": s.memory_mb}
        function = self.name if self.caged else self._function
        return _again, (function, {"caged": self.caged, "setting": self._setting, **limits})

    def _arguments(self, query: Query, text: str, truncated: bool) -> tuple[list[Any], dict[str, Any]]:
        """The completion, and of the columns those that the function takes."""
        names, takes_all = self._parameters
        prompt = query.prompt if isinstance(query.prompt, str) else [turn.as_dict() for turn in query.prompt]
        columns: dict[str, Any] = {"prompt": prompt, **query.columns, "answer": query.answer}
        if "truncated" in names:
            columns["truncated"] = truncated
        if "completions" in names:
            columns["prompts"] = columns["prompt"]
            named = {name: [value] for name, value in columns.items() if takes_all or name in names}
            return [], {**named, "completions": [text]}
        first = "completion" if "completion" in names or not names else names[0]
        given = {name: value for name, value in columns.items() if (takes_all or name in names) and name != first}
        return ([], {**given, first: text}) if first in names else ([text], given)

    def _called(self, query: Query, positional: list[Any], named: dict[str, Any]) -> Any:
        try:
            result = self._function(*positional, **named)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_awaited(result), self._started_loop()).result()
        except (Exception, SystemExit) as error:
            raise VerifierError(
                f"{self.name} raised {type(error).__name__} ({' '.join(str(error).split())[:300]}) on query "
                f"{query.id!r}; mend it, or set {self._setting} to count such answers as 0"
            ) from error
        return result

    def _value(self, result: Any) -> float | None:
        if "completions" in self._parameters[0]:
            values = list(result) if hasattr(result, "__iter__") and not isinstance(result, str | Mapping) else None
            if values is None or len(values) != 1:
                raise TypeError(
                    f"gave {_told(result)} for a list of one completion; it must give a list of one number or None"
                )
            result = values[0]
        if result is None:
            return None
        if isinstance(result, str):  # float("1") is no number that anybody meant
            raise TypeError("gave a str; it must give a float, a bool or None")
        try:
            return float(result)
        except TypeError as error:
            raise TypeError(f"gave {_told(result)}; it must give a float, a bool or None") from error

    def _started_cage(self) -> Cage:
        with self._lock:
            if self._owner != os.getpid():  # a forked child leaves its parent's workers alone
                self._cage, self._loop, self._owner = None, None, os.getpid()
            if self._cage is None:
                self._cage = Cage(self._cage_settings)
            return self._cage

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls, as clients of services need it; in a thread of its own, as notebooks need it."""
        with self._lock:
            if self._owner != os.getpid():
                self._cage, self._loop, self._owner = None, None, os.getpid()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=[self._loop], name="r3-async-judge", daemon=True).start()
            return self._loop


class FunctionJudge:
    """A function as the judge: an answer whose score is above `threshold` is right."""

    def __init__(self, function: str | Callable[..., Any], *, threshold: float = 0.5, **options: Any) -> None:
        self.threshold = threshold
        self._score = ScoreFunction(function, **options)

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        return TRUNCATED if truncated else verdict_of(self._score(query, text), self.threshold)

    def close(self) -> None:
        self._score.close()


def verdict_of(score: Score, threshold: float) -> Verdict:
    """What a score says of right and wrong."""
    if score.failed or score.value is None:
        return Verdict(False, score.failed or "abstained", score.seconds)
    right = score.value > threshold
    return Verdict(right, "match" if right else "different", score.seconds)


def _again(function: str | Callable[..., Any], options: dict[str, Any]) -> ScoreFunction:
    return ScoreFunction(function, **options)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _told(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if hasattr(value, "__len__") else "")


async def _awaited(result: Any) -> Any:
    return await result


def _parameters(function: Callable[..., Any]) -> tuple[Sequence[str], bool]:
    """The names of a function's parameters, and whether it takes any others too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built in C do not tell
        return (), True
    kinds = inspect.Parameter
    names = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    only_positional = any(p.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL) for p in parameters)
    return (() if only_positional else names), any(p.kind == kinds.VAR_KEYWORD for p in parameters)


def _imported(dotted: str) -> Callable[..., Any]:
    try:
        return target(dotted)
    except (ImportError, AttributeError, ValueError, AssertionError) as error:
        module = sys.modules.get(dotted.rpartition(".")[0])
        where = f" in {module.__file__}" if module is not None and getattr(module, "__file__", None) else ""
        raise VerifierError(
            f"{dotted}: cannot import it ({error}{where}); write package.module.function, of a function "
            "f(completion, **columns) → float or bool"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a module of the user's does when it is imported
        told = " ".join(str(error).split())[:200]
        raise VerifierError(
            f"{dotted}: importing it raised {type(error).__name__} ({told}); mend the module"
        ) from error
