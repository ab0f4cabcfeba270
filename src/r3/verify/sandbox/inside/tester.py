"""The tests' process: it runs the tests on values that the answer's process returns, and says what came of it.

It never runs a line of the answer's, and the answer's process has neither the tests nor the way the verdict takes.

Which names of a test are the answer's is decided from the tests alone (`resolve`): no answer can put its own `abs`
there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import random
import sys
from collections.abc import Iterable
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from .messages import NotPlain
from .remote import AnswerGone, Connection, Remote, Run

_SHOWN_SOURCE, _SHOWN_VALUE, _SHOWN_OUTPUT, _SHOWN_LINES = 300, 200, 400, 6
_TEST_FILE = "<test>"


class Failure(NamedTuple):
    """Why a test did not pass: a word to count, and what a reader should know."""

    reason: str
    text: str


def judge(job: dict[str, Any], runs: list[Run], seconds: float, output_limit: int) -> dict[str, Any]:
    """What came of the tests: passed, total, and the first failure."""
    random.seed(0)
    try:
        if job["programs"]:
            return _programs(job, runs, seconds, output_limit)
        return _functions(job, runs[0], seconds, output_limit)
    except (MemoryError, OSError, RecursionError) as error:
        failure = Failure("crashed", f"The tests cannot go on: {type(error).__name__}: {error}")
        return _verdict(0, len(job["tests"]), failure)


def _functions(job: dict[str, Any], run: Run, seconds: float, output_limit: int) -> dict[str, Any]:
    tests: list[str] = job["tests"]
    total = len(tests)
    try:
        names, preparation, programs = _prepared(job)
    except (SyntaxError, ValueError, RecursionError, ImportError) as error:
        return _verdict(0, total, Failure("bad test", f"The tests cannot be run: {type(error).__name__}: {error}"))
    connection = Connection(run, seconds)
    for name, source in names.items():
        if source is None:
            names[name] = Remote(connection, ["global", name], "function")
    failure = _loaded(connection, job, "answer")
    if failure is None and preparation is not None:
        failure = _attempt(connection, preparation, names, job["setup"], "The tests' set-up")
    passed = 0
    for number, (test, program) in enumerate(zip(tests, programs, strict=True), 1) if failure is None else ():
        outcome = _attempt(connection, program, names, test, f"Test {number} of {total}" if total > 1 else "The test")
        passed += outcome is None
        failure = failure or outcome
        if failure is not None and (connection.gone or not job["graded"]):
            break
    return _verdict(passed, total, failure, _text(run.output, output_limit))


def _prepared(job: dict[str, Any]) -> tuple[dict[str, Any], CodeType | None, list[CodeType]]:
    """The tests' namespace, in which None stands for what the answer defines; their set-up and tests, compiled."""
    names: dict[str, Any] = {"__name__": "tests"}
    if job["entry_point"]:
        with contextlib.suppress(SyntaxError):  # a problem in prose
            exec(compile(job["preamble"], "<problem>", "exec"), names)
        names[job["entry_point"]] = None
    setup, *trees = (ast.parse(source) for source in (job["setup"], *job["tests"]))
    theirs, modules = resolve([setup, *trees], set(names) - {"__name__", "__builtins__"})
    names |= {name: importlib.import_module(name) for name in modules} | dict.fromkeys(theirs)
    programs = [compile(KeepLeft().visit(tree), _TEST_FILE, "exec") for tree in trees]
    return names, compile(setup, _TEST_FILE, "exec") if setup.body else None, programs


def _loaded(connection: Connection, job: dict[str, Any], name: str) -> Failure | None:
    try:
        reply = connection.ask("load", job["preamble"], job["code"], name)
    except AnswerGone as gone:
        return Failure(str(gone), _gone("The answer", str(gone)))
    if "raised" not in reply:
        return None
    kind, message, where = (str(reply.get(key, "")) for key in ("raised", "message", "where"))
    reason = {"SyntaxError": "syntax", "IndentationError": "syntax", "TabError": "syntax"}.get(kind) or _reason(kind)
    return Failure(reason, _joined("The answer does not run.", f"{kind}: {message}", where))


def _attempt(
    connection: Connection, program: CodeType, names: dict[str, Any], source: str, what: str
) -> Failure | None:
    """Run one test; None if it passes."""
    names.pop(GOT, None)
    try:
        exec(program, names)
    except AnswerGone as gone:
        return Failure(str(gone), _joined(_gone(what, str(gone)), _shown(source)))
    except BaseException as error:  # noqa: BLE001 whatever a test raises, it has failed
        return _failure(error, names, source, what)
    if connection.gone:  # the test has hidden it
        return Failure(connection.gone, _gone(what, connection.gone))
    return None


def _failure(error: BaseException, names: dict[str, Any], source: str, what: str) -> Failure:
    frame_names, number = _innermost(error.__traceback__)
    line = _shown(_statement(source, number))
    head = f"{what} fails:"
    if (raised := getattr(error, "raised_by_answer", None)) is not None:
        kind, message, where = raised
        return Failure(_reason(kind), _joined(head, line, f"{kind}: {message}", where))
    if isinstance(error, NotPlain):
        return Failure("not plain", _joined(head, line, f"It got {error}"))
    got = (frame_names or names).get(GOT, _NOTHING)
    if isinstance(error, AssertionError):
        return Failure("fail", _joined(head, line, "" if got is _NOTHING else f"It got {_value(got)}"))
    text = f"{type(error).__name__}: {str(error)[:_SHOWN_VALUE]}"
    return Failure("exception", _joined(head, line, text, "" if got is _NOTHING else f"It got {_value(got)}"))


_NOTHING = object()


def _reason(kind: str) -> str:
    return {"MemoryError": "memory", "SystemExit": "exit", "KeyboardInterrupt": "exit"}.get(kind, "exception")


def _gone(what: str, why: str) -> str:
    return f"{what} took too long." if why == "timeout" else f"{what} ended the program."


def _innermost(trace: TracebackType | None) -> tuple[dict[str, Any], int]:
    """The names and the line of the innermost frame that is a test's."""
    names: dict[str, Any] = {}
    number = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEST_FILE:
            names, number = trace.tb_frame.f_locals, trace.tb_lineno
        trace = trace.tb_next
    return names, number


def _statement(source: str, number: int) -> str:
    """The assert that a line belongs to, or the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.lineno <= number <= (node.end_lineno or 0):
            return ast.get_source_segment(source, node) or ""
    lines = source.splitlines()
    return lines[number - 1] if 0 < number <= len(lines) else source


def _programs(job: dict[str, Any], runs: list[Run], seconds: float, output_limit: int) -> dict[str, Any]:
    """Each test is a run of the whole program: what it prints for an input."""
    tests: list[list[str]] = job["tests"]
    passed, first, shown = 0, None, ""
    for number, ((given, expected), run) in enumerate(zip(tests, runs, strict=True), 1):
        os.pwrite(run.stdin, given.encode("utf-8", "replace"), 0)
        what = f"Test {number} of {len(tests)}" if len(tests) > 1 else "The test"
        connection = Connection(run, seconds)
        failure = _loaded(connection, job, "__main__")
        printed = _text(run.output, output_limit)
        if failure is None or failure.reason in ("exit", "crashed"):  # it may end as it likes, `os._exit` included
            same = _lines(printed) == _lines(expected)
            wanted = (f"For the input {_value(given)}", f"it should print {_value(expected)}")
            failure = None if same else Failure("fail", _joined(f"{what} fails.", *wanted))
        passed += failure is None
        if failure is not None and first is None:
            first, shown = failure, printed
            if not job["graded"]:
                break
    return _verdict(passed, len(tests), first, shown)


def _lines(text: str) -> list[str]:
    """Lines without spaces at their ends, without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()


def _text(handle: int, limit: int) -> str:
    return os.pread(handle, limit, 0).decode("utf-8", "replace")


def _verdict(passed: int, total: int, failure: Failure | None, output: str = "") -> dict[str, Any]:
    if failure is None:
        return {"passed": passed, "total": total, "reason": "pass", "feedback": ""}
    lines = output[:_SHOWN_OUTPUT].splitlines()[:_SHOWN_LINES]
    printed = "It printed:\n" + "\n".join(lines) if lines else ""
    return {"passed": passed, "total": total, "reason": failure.reason, "feedback": _joined(failure.text, printed)}


def _shown(source: str) -> str:
    text = source.strip()
    return text if len(text) <= _SHOWN_SOURCE else text[:_SHOWN_SOURCE] + " …"


def _value(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        return f"a value of type {type(value).__name__} too large to be shown"
    return text if len(text) <= _SHOWN_VALUE else text[:_SHOWN_VALUE] + " …"


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


# ------------------------------------------------------------- whose name it is


GOT = "__r3_got__"


class Names(ast.NodeVisitor):
    """Names that a source reads, binds, and uses as `name.attribute` only."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.plain: set[str] = set()
        """Read other than for an attribute."""

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)
            self.plain.add(node.id)
        else:
            self.bound.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.read.add(node.value.id)
        else:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).split(".")[0])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bound.add(node.name or "")
        self.generic_visit(node)


def resolve(trees: Iterable[ast.Module], known: Iterable[str]) -> tuple[set[str], set[str]]:
    """The names that only the answer can have defined, and the modules that tests use without importing them.

    A name of Python's own is the answer's only where a test asks for nothing else: `assert sum(10, 15) == 6`.
    """
    names, trees = Names(), list(trees)
    for tree in trees:
        names.visit(tree)
    missing = names.read - names.bound - set(known)
    missing = {name for name in missing if not name.startswith("__")}
    modules = {name for name in missing - names.plain if name in sys.stdlib_module_names}
    theirs = {name for name in missing - modules if not hasattr(builtins, name)}
    if not theirs and not known:
        theirs = {name for tree in trees for name in _asked(tree) if hasattr(builtins, name)}
    return theirs, modules


def _asked(tree: ast.Module) -> Iterable[str]:
    """The functions that asserts call on their left."""
    for node in tree.body:
        if isinstance(node, ast.Assert):
            left = node.test.left if isinstance(node.test, ast.Compare) else node.test
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name):
                yield left.func.id


class KeepLeft(ast.NodeTransformer):
    """Have `assert left == right` keep what was on the left, so that a failing test can say what it got."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        if isinstance(node.test, ast.Compare):
            node.test.left = ast.NamedExpr(ast.Name(GOT, ast.Store()), node.test.left)
        elif isinstance(node.test, ast.Call):
            node.test = ast.NamedExpr(ast.Name(GOT, ast.Store()), node.test)
        return ast.fix_missing_locations(node)
