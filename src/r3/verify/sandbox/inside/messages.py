"""Messages between processes of the sandbox: JSON with its length in front, over file descriptors.

Values between the answer's process and the tests' are plain data with exact types, rebuilt on arrival (`pack`,
`unpack`).

An object of the answer's own never crosses. What is a subclass of a plain type crosses as that type; anything else as a
handle, a number under which its process keeps it. So what a test compares is always a value that the test's own process
made, and no `__eq__`, `__hash__` or `__bool__` of the answer's is ever asked.
"""

from __future__ import annotations

import builtins
import datetime
import json
import math
import os
import select
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

LARGEST = 16 * 2**20
_HEAD = 4


def send(handle: int, message: Any) -> None:
    body = json.dumps(message).encode("ascii")
    if len(body) > LARGEST:
        raise ValueError(f"a value of more than {LARGEST >> 20} MB")
    data = memoryview(len(body).to_bytes(_HEAD, "big") + body)
    while data:
        data = data[os.write(handle, data) :]


def until(deadline: float) -> Callable[[], float]:
    """The seconds left until a time of the monotonic clock."""
    return lambda: deadline - time.monotonic()


def receive(handle: int, left: Callable[[], float] | None = None) -> Any:
    """The next message. EOFError if the other side is gone or sends no messages, TimeoutError once no time is left."""
    size = int.from_bytes(_exactly(handle, _HEAD, left), "big")
    if size > LARGEST:
        raise EOFError("a message larger than any")
    body = _exactly(handle, size, left)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EOFError("not a message") from error


def _exactly(handle: int, size: int, left: Callable[[], float] | None) -> bytes:
    parts = []
    waiting = select.poll()  # not select.select, which takes no descriptor above 1023
    waiting.register(handle, select.POLLIN)
    while size:
        if left is not None:
            _wait(waiting, left)
        part = os.read(handle, min(size, 2**20))
        if not part:
            raise EOFError("the other side has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(waiting: select.poll, left: Callable[[], float]) -> None:
    """Until there is something to read. Asked again and again, since what is left may be another process's CPU time."""
    while (seconds := left()) > 0:
        if waiting.poll(math.ceil(seconds * 1000)):
            return
    raise TimeoutError


# ----------------------------------------------------------------------- values


Handle = Callable[[Any], list[Any]]  # what stands for an object that is not plain
Object = Callable[[list[Any]], Any]  # the object, or a stand-in, for what such a list says

_SMALL = 2**63
_BUILTINS = {
    name: value
    for name, value in vars(builtins).items()
    if callable(value) and not name.startswith("_") and name not in ("exit", "quit", "copyright", "credits", "license")
}
_NAMES = {id(value): name for name, value in _BUILTINS.items()}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", defaultdict: "dict", Counter: "Counter", OrderedDict: "OrderedDict"}
_BASES = (int, float, str, *_SEQUENCES, *_MAPPINGS)
_MAKE: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
}  # fmt: skip
_MAKE_MAPPING: dict[str, Callable[[Iterable[Any]], Any]] = {
    "dict": dict, "Counter": lambda pairs: Counter(dict(pairs)), "OrderedDict": OrderedDict,
}  # fmt: skip
_DATES: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
}


class NotPlain(TypeError):
    """A value that cannot be sent."""


def pack(value: Any, handle: Handle) -> Any:
    """The value as something JSON has."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["int", hex(value)]
    if name := _SEQUENCES.get(kind):
        return [name, *(pack(item, handle) for item in value)]
    if name := _MAPPINGS.get(kind):
        return [name, *([pack(key, handle), pack(item, handle)] for key, item in value.items())]
    if (special := _rare(value, kind)) is not None:
        return special
    if isinstance(value, type) or not issubclass(kind, _BASES):
        return handle(value)
    return _as_base(value, kind, handle)


def unpack(data: Any, stand_in: Object) -> Any:
    """The value that `pack` made the data from. Data of any other form is a ValueError."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no value")
        return data
    name, *items = data
    if make := _MAKE.get(name):
        return make(unpack(item, stand_in) for item in items)
    if make := _MAKE_MAPPING.get(name):
        return make((unpack(key, stand_in), unpack(item, stand_in)) for key, item in items)
    if name == "int":
        return int(items[0], 16)
    if name in ("bytes", "bytearray"):
        raw = bytes.fromhex(items[0])
        return raw if name == "bytes" else bytearray(raw)
    if name == "complex":
        return complex(*map(float, items))
    if name == "range":
        return range(*(int(item, 16) for item in items))
    if name == "Decimal":
        return Decimal(items[0])
    if name == "Fraction":
        return Fraction(*(int(item, 16) for item in items))
    if name == "array":
        return array(items[0], items[1:])
    if name == "timedelta":
        return datetime.timedelta(*map(int, items))
    if name in _DATES:
        return _DATES[name](items[0])
    if name == "builtin":
        return _BUILTINS[items[0]]
    return stand_in(data)


def _rare(value: Any, kind: type) -> list[Any] | None:
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is Decimal:
        return ["Decimal", str(value)]
    if kind is Fraction:
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    if kind is array:
        return ["array", value.typecode, *value]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind in (datetime.date, datetime.time, datetime.datetime):
        return [kind.__name__, value.isoformat()]
    if (name := _NAMES.get(id(value))) is not None:
        return ["builtin", name]
    return None


def _as_base(value: Any, kind: type, handle: Handle) -> Any:
    """A subclass's value as its plain base's, taken with the base's own methods."""
    if issubclass(kind, int):
        return pack(int.__int__(value), handle)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, str):
        return str.__add__(value, "")
    for base, name in _MAPPINGS.items():
        if base is not dict and issubclass(kind, base):
            return [name, *([pack(key, handle), pack(item, handle)] for key, item in dict.items(value))]
    if issubclass(kind, dict):
        return ["dict", *([pack(key, handle), pack(item, handle)] for key, item in dict.items(value))]
    base = next(base for base in _SEQUENCES if issubclass(kind, base))
    return [_SEQUENCES[base], *(pack(item, handle) for item in base.__iter__(value))]  # type: ignore[attr-defined]
