"""Messages between processes of the sandbox: JSON with its length in front, over file descriptors."""

from __future__ import annotations

import json
import math
import os
import select
import time
from collections.abc import Callable
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
