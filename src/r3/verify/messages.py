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


class Malformed(ValueError):
    """Bytes that are not a valid message: their sender is no longer trusted."""


def send(channel: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Send a message. TimeoutError if the other side has not taken it by the deadline (monotonic)."""
    body = json.dumps(message, default=float).encode("ascii")
    channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
    channel.sendall(len(body).to_bytes(_HEAD, "big") + body)


def receive(channel: socket.socket, deadline: float | None = None, largest: int = LARGEST_MESSAGE) -> Any:
    """The next message. EOFError if the other side is gone, TimeoutError after the deadline, Malformed for anything
    but a valid message of at most the largest size."""
    size = int.from_bytes(_exactly(channel, _HEAD, deadline), "big")
    if size > largest:
        raise Malformed(f"a message of {size:,} bytes; {largest:,} are the most")
    body = _exactly(channel, size, deadline)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON ({type(error).__name__})") from error


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    channel.settimeout(None)
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
