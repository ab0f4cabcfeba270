"""Messages between the cage and its processes: JSON with a length in front. Never pickle: workers are not trusted.

JSON escapes carry NUL bytes and lone surrogates unharmed.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

LARGEST_MESSAGE = 64 * 2**20
_HEAD = 4


def send(channel: socket.socket, message: Any) -> None:
    body = json.dumps(message, default=float).encode("ascii")
    channel.sendall(len(body).to_bytes(_HEAD, "big") + body)


def receive(channel: socket.socket, deadline: float | None = None) -> Any:
    """The next message. EOFError if the other side is gone, TimeoutError after the deadline (monotonic)."""
    size = int.from_bytes(_exactly(channel, _HEAD, deadline), "big")
    if size > LARGEST_MESSAGE:
        raise EOFError("a message larger than any of ours: the worker is not to be trusted any more")
    return json.loads(_exactly(channel, size, deadline))


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        part = channel.recv(min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
