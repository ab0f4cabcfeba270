"""Messages between processes of the sandbox: JSON with its length in front, over file descriptors."""

from __future__ import annotations

import json
import os
import select
import time
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


def receive(handle: int, deadline: float | None = None) -> Any:
    """The next message. EOFError if the other side is gone or sends no messages, TimeoutError after the deadline."""
    size = int.from_bytes(_exactly(handle, _HEAD, deadline), "big")
    if size > LARGEST:
        raise EOFError("a message larger than any")
    body = _exactly(handle, size, deadline)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EOFError("not a message") from error


def _exactly(handle: int, size: int, deadline: float | None) -> bytes:
    parts = []
    waiting = select.poll()  # not select.select, which takes no descriptor above 1023
    waiting.register(handle, select.POLLIN)
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                raise TimeoutError
        part = os.read(handle, min(size, 2**20))
        if not part:
            raise EOFError("the other side has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
