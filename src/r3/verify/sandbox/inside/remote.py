"""The tests' view of the answer: names and objects of another process, reached by questions with a deadline."""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from . import messages
from .messages import NotPlain, pack, unpack

# Raised by a call, these would not end a test but steer it: a loop that asks the answer would stop as if it were done.
_STEERING = (StopIteration, StopAsyncIteration, GeneratorExit)


WALL = 3
"""Seconds of the clock for each second of CPU time."""
_OF_A_PROCESS = 2  # in a clock's number: the CPU time of a process (Linux's include/linux/posix-timers.h)


class Run(NamedTuple):
    """The tests' ends of one answer's process."""

    pid: int
    channel: int
    stdin: int
    output: int


class AnswerGone(BaseException):
    """The answer's process ended, or did not answer in time. Not an Exception: no test's `except` means this."""


class AnswerError(RuntimeError):
    """An exception that the answer raised and that has no counterpart here."""


class Connection:
    """Questions to one answer's process, all within one deadline."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.run = run
        # Time of the answer's own, since on a busy machine others take some; more of the clock's, for what only waits.
        self._clock = (~run.pid << 3) | _OF_A_PROCESS
        self._cpu_end = time.clock_gettime(self._clock) + seconds
        self._end = time.monotonic() + WALL * seconds
        self.gone = ""
        """Why nothing can be asked any more; no test passes after that, even one that hides the exception."""

    def ask(self, *question: Any) -> dict[str, Any]:
        if not self.gone:
            try:
                messages.send(self.run.channel, question)
                reply = messages.receive(self.run.channel, self._left)
                if isinstance(reply, dict):
                    return reply
                self.gone = "crashed"
            except TimeoutError:
                self.gone = "timeout"
            except (EOFError, OSError):
                self.gone = "crashed"
        raise AnswerGone(self.gone)

    def _left(self) -> float:
        cpu = self._cpu_end - time.clock_gettime(self._clock)
        return min(cpu, self._end - time.monotonic())

    def value(self, *question: Any) -> Any:
        """The value that a question has, or the exception that the answer raised."""
        return self._value(self.ask(*question))

    def call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        packed = [self.pack(argument) for argument in arguments]
        reply = self.ask("call", function, packed, {key: self.pack(value) for key, value in named.items()})
        value = self._value(reply)
        changed = reply.get("changed")
        for index, after in changed.items() if isinstance(changed, dict) else ():
            _update(arguments[int(index)], self.unpack(after))
        return value

    def pack(self, value: Any) -> Any:
        return pack(value, _handle_of)

    def unpack(self, data: Any) -> Any:
        try:
            return unpack(data, self._stand_in)
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, RecursionError) as error:
            self.gone = "crashed"  # no reply of ours looks like that
            raise AnswerGone(self.gone) from error

    def _stand_in(self, data: list[Any]) -> Remote:
        kind, number, name = data
        if kind != "object":
            raise ValueError("no value")
        return Remote(self, ["object", int(number)], str(name)[:80])

    def _value(self, reply: dict[str, Any]) -> Any:
        if "raised" in reply:
            _raise(*(str(reply.get(key, "")) for key in ("raised", "message", "where")))
        return self.unpack(reply.get("value"))


class Remote:
    """A function or object of the answer's. It can be called, looked into and handed back, but never compared."""

    __slots__ = ("_connection", "_handle", "_kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, connection: Connection, handle: list[Any], kind: str) -> None:
        for name, value in zip(self.__slots__, (connection, handle, kind), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._connection.call(self._handle, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.value("get", self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.value("set", self._handle, name, self._connection.pack(value))

    def __getitem__(self, key: Any) -> Any:
        return self._connection.value("item", self._handle, self._connection.pack(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._connection.value("set_item", self._handle, self._connection.pack(key), self._connection.pack(value))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._connection.value("items", self._handle))

    def __len__(self) -> int:
        size = self._connection.value("size", self._handle)
        return size if isinstance(size, int) else self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotPlain(f"a value of type {self._kind}, which is not plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._kind} object>"


def _handle_of(value: Any) -> list[Any]:
    if type(value) is Remote:
        handle: list[Any] = value._handle
        return handle
    raise NotPlain(f"the test hands over a value of type {type(value).__name__}, which is not plain data")


def _update(argument: Any, after: Any) -> None:
    """What the answer did to an argument, done to the test's own copy."""
    if type(argument) is not type(after):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = after
    else:
        argument.clear()
        argument.extend(after) if hasattr(argument, "extend") else argument.update(after)


def _raise(kind: str, message: str, where: str) -> NoReturn:
    if kind == "NotPlain":
        raise NotPlain(message)
    raised = getattr(builtins, kind, None)
    plain = isinstance(raised, type) and issubclass(raised, Exception) and not issubclass(raised, _STEERING)
    error: Any = AnswerError(f"{kind}: {message}")
    if plain and raised is not None:
        with contextlib.suppress(TypeError):  # one that wants more arguments
            error = raised(message)
    error.raised_by_answer = (kind, message, where)
    raise error
