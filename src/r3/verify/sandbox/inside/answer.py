"""The answer's process: it runs the answer's code and does what the tests' process asks of it. It never sees a test.

Even if the answer tampers with this module, it can change only the values that it returns, which the tests then judge.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import messages
from .messages import NotPlain, pack, unpack

ANSWER_FILE = "<answer>"
_MUTABLE = {"list", "dict", "set", "deque", "bytearray", "Counter", "OrderedDict"}
_MESSAGE = 300


class Service:
    """What the answer defined, the objects it handed out, and the operations on them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self._objects: list[Any] = []

    def load(self, preamble: str, code: str, name: str) -> None:
        """Run the answer; where it is no program by itself, as a continuation of the preamble."""
        self.names = {"__name__": name, "__builtins__": builtins}
        try:
            program = compile(code, ANSWER_FILE, "exec")
        except SyntaxError:
            if not preamble:
                raise
            code, preamble = f"{preamble.rstrip()}\n{code}", ""
            program = compile(code, ANSWER_FILE, "exec")
        self.lines = code.splitlines()
        if preamble:
            exec(compile(preamble, "<problem>", "exec"), self.names)
        try:
            exec(program, self.names)
        finally:
            if name == "__main__":  # what a program still does at its end
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()

    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
        """A call's value, and the arguments that it changed."""
        values = [self.unpack(argument) for argument in arguments]
        result = self.unpack(function)(*values, **{key: self.unpack(value) for key, value in named.items()})
        packed = self.pack(result)
        changed = {}
        for index, (before, value) in enumerate(zip(arguments, values, strict=True)):
            if isinstance(before, list) and before[0] in _MUTABLE and (after := self.pack(value)) != before:
                changed[index] = after
        return packed, changed

    def get(self, target: Any, name: str) -> Any:
        return self.pack(getattr(self.unpack(target), name))

    def set(self, target: Any, name: str, value: Any) -> Any:
        return setattr(self.unpack(target), name, self.unpack(value))

    def item(self, target: Any, key: Any) -> Any:
        return self.pack(self.unpack(target)[self.unpack(key)])

    def set_item(self, target: Any, key: Any, value: Any) -> None:
        self.unpack(target)[self.unpack(key)] = self.unpack(value)

    def items(self, target: Any) -> Any:
        return self.pack(list(self.unpack(target)))

    def size(self, target: Any) -> Any:
        return self.pack(len(self.unpack(target)))

    def pack(self, value: Any) -> Any:
        try:
            return pack(value, self._handle)
        except RecursionError:
            raise NotPlain("a value nested too deeply to be compared") from None

    def unpack(self, data: Any) -> Any:
        return unpack(data, self._object)

    def _handle(self, value: Any) -> list[Any]:
        self._objects.append(value)
        return ["object", len(self._objects) - 1, type(value).__name__]

    def _object(self, data: list[Any]) -> Any:
        if data[0] == "global":
            if data[1] not in self.names and not hasattr(builtins, data[1]):
                raise NameError(f"name {data[1]!r} is not defined")
            return self.names[data[1]] if data[1] in self.names else getattr(builtins, data[1])
        return self._objects[data[1]]


def serve(channel: int) -> None:
    """Do what is asked until the other side ends."""
    random.seed(0)
    sys.argv = [""]
    for name in ("exit", "quit"):  # as in any program; Python's `site` defines them, which is not loaded
        setattr(builtins, name, sys.exit)
    service = Service()
    while True:
        try:
            operation, *arguments = messages.receive(channel)
        except EOFError:
            return
        reply = _done(service, getattr(service, operation), arguments)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        try:
            messages.send(channel, reply)
        except ValueError as error:
            messages.send(channel, {"raised": "NotPlain", "message": str(error), "where": ""})


def _done(service: Service, operation: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        result = operation(*arguments)
    except BaseException as error:  # noqa: BLE001 whatever an answer raises is a reply
        return {"raised": type(error).__name__, "message": _message(error), "where": _where(error, service.lines)}
    value, changed = result if isinstance(result, tuple) else (result, {})
    return {"value": value, "changed": changed}


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MESSAGE]
    except BaseException:  # noqa: BLE001 the answer's own __str__
        return ""


def _where(error: BaseException, lines: list[str]) -> str:
    """The innermost line of the answer that the exception passed."""
    if isinstance(error, SyntaxError):
        number: int | None = error.lineno
    else:
        number, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == ANSWER_FILE:
                number = trace.tb_lineno
            trace = trace.tb_next
    if not number or not 0 < number <= len(lines):
        return ""
    return f"line {number}: {lines[number - 1].strip()[:_MESSAGE]}"


def become(channel: int, stdin: int, output: int) -> None:
    """Close every file descriptor but these, which become standard input, output and error."""
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(channel, 3)
    os.closerange(4, 1024)
