"""The judge of code: the answer's last fenced block, run against tests in a sandbox. Right if all of them pass.

The columns of a query say what to run (docs/code.md): `tests`, and optionally `setup` and `entry_point`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from r3.verify.judge import TRUNCATED, Verdict, VerifierError
from r3.verify.sandbox import Job, Outcome, Sandbox, SandboxSettings

if TYPE_CHECKING:
    from r3.samples import Query

log = logging.getLogger(__name__)

LONGEST = 100_000
"""Most characters of code: more than anyone writes in answer to a question."""
_FENCE = "```"
_LANGUAGES = ("", "py", "py3", "python", "python3", "python 3")


class CodeVerifier:
    """The judge over a sandbox. Any thread may use it; a forked child starts its own workers."""

    def __init__(self, settings: SandboxSettings | None = None, *, graded: bool = False) -> None:
        self.settings = settings or SandboxSettings()
        self.graded = graded
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._owner = os.getpid()

    def judge(self, query: Query, text: str, *, truncated: bool = False) -> Verdict:
        if truncated:
            return TRUNCATED
        started = time.perf_counter()
        return replace(self._judged(text, query.columns), seconds=time.perf_counter() - started)

    def start(self) -> list[str]:
        """Start a worker now, so that a machine that cannot isolate code fails early. Returns the walls it has."""
        return self._here().start()

    def close(self) -> None:
        with self._lock:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None and self._owner == os.getpid():
            sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.settings, self.graded)

    def _here(self) -> Sandbox:
        with self._lock:
            if self._owner != os.getpid():  # a forked child leaves its parent's workers alone
                self._sandbox, self._owner = None, os.getpid()
            if self._sandbox is not None:
                return self._sandbox
            sandbox = self._sandbox = Sandbox(self.settings)
        walls = sandbox.start()
        if self.settings.walls == "none":
            log.warning("answers' code runs without isolation (sandbox=none): it can do whatever this user can")
        else:
            log.info("answers' code runs behind: %s", "; ".join(walls))
        return sandbox

    def _judged(self, completion: str, columns: Mapping[str, Any]) -> Verdict:
        code = code_of(completion)
        if not code.strip():
            return Verdict(False, "no code", feedback="There is no code in the answer.")
        if len(code) > LONGEST:
            return Verdict(False, "too long", feedback=f"The code is longer than {LONGEST:,} characters.")
        outcome = self._here().judge(job_of(code, columns), graded=self.graded)
        return _verdict(outcome, self.graded)


def _verdict(outcome: Outcome, graded: bool) -> Verdict:
    right = outcome.reason == "pass" and outcome.passed == outcome.total
    scores = {"correct": 0.0, "tests": outcome.passed / outcome.total} if graded and not right else None
    return Verdict(right, outcome.reason, feedback=outcome.feedback, scores=scores)


def _again(settings: SandboxSettings, graded: bool) -> CodeVerifier:
    return CodeVerifier(settings, graded=graded)


def code_of(completion: str) -> str:
    """The last fenced block of Python, or of no named language; the whole answer where there is none.

    A block that is never closed reaches to the end.

    >>> code_of("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```py\\nx = 2\\n```\\nIt prints:\\n```text\\n2\\n```")
    'x = 2'
    >>> code_of("x = 3")
    'x = 3'
    """
    blocks = [lines for language, lines in _blocks(completion) if language.lower() in _LANGUAGES]
    return "\n".join(blocks[-1]) if blocks else completion


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Fenced blocks, as the language behind the fence and the lines."""
    lines: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        stripped = line.strip()
        if lines is None:
            if stripped.startswith(_FENCE):
                language, lines = stripped.removeprefix(_FENCE).strip(), []
        elif stripped == _FENCE:
            yield language, lines
            lines = None
        else:
            lines.append(line)
    if lines is not None:
        yield language, lines


def job_of(code: str, columns: Mapping[str, Any]) -> Job:
    """The job of a row: tests are Python sources, or objects with a program's `input` and `output`."""
    where = columns.get("id", "?")
    tests = columns.get("tests")
    if not isinstance(tests, list | tuple) or not tests:
        raise VerifierError(f"row {where}: the judge of code needs a column tests, a list with at least one test")
    if all(isinstance(test, str) for test in tests):
        entry_point = str(columns.get("entry_point") or "")
        preamble = str(columns.get("problem", "")) if entry_point else ""
        return Job(code, [str(test) for test in tests], str(columns.get("setup") or ""), preamble, entry_point)
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
        return Job(code, [(str(test["input"]), str(test["output"])) for test in tests])
    raise VerifierError(
        f"row {where}: every test is Python source, or every test an object with the keys input and output"
    )
