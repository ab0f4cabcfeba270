"""Token ids, log-probs and entropies as one compact blob: 7 bytes a token for vocabularies below 65,536, else 8.

| array     | stored as                           | error                                                    |
|-----------|-------------------------------------|----------------------------------------------------------|
| tokens    | 16 bits, or 24 if any needs them    | none; ids must be below 2^24                             |
| logprobs  | float32 rounded to its top 24 bits  | at most 2^-16 of the value: 1.3e-4 at log-prob -8        |
| entropies | float16                             | at most 2^-11 of the value, or 2^-25 if that is more     |

Rounding is idempotent: what was decoded encodes to the same bytes, so a sample read, exported, imported and read again
never drifts. The sum of the log-probs of a response is off by at most 2^-16 of its absolute value.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.samples import FloatArray, IntArray

_HEADER = struct.Struct("<BxxxI")  # flags, length; 8 bytes keep what follows aligned
_WIDE_TOKENS = 1
_HAS_ENTROPIES = 2

MAX_TOKEN = 2**24 - 1
MAX_ENTROPY = float(np.finfo(np.float16).max)


def encode(tokens: IntArray, logprobs: FloatArray, entropies: FloatArray | None) -> bytes:
    """The arrays as a blob; ValueError names the array that cannot be stored.

    >>> import numpy as np
    >>> blob = encode(np.array([5, 70_000]), np.array([-0.5, -2.0]), np.array([0.25, 1.5]))
    >>> len(blob), decode(blob)[0].tolist()
    (24, [5, 70000])
    """
    _check(tokens, logprobs, entropies)
    wide = int(tokens.max()) >= 2**16
    flags = (_WIDE_TOKENS if wide else 0) | (_HAS_ENTROPIES if entropies is not None else 0)
    words = _top_24(logprobs)
    # 24 bits are split into a plane of 16 and one of 8. The 16-bit planes come first, so that each is aligned and is
    # converted by one whole-array operation.
    planes = [tokens.astype("<u2"), (words >> 8).astype("<u2")]
    planes += [] if entropies is None else [entropies.astype("<f2")]
    planes += [(tokens >> 16).astype(np.uint8)] if wide else []
    planes += [words.astype(np.uint8)]  # the low byte: astype keeps no more
    return b"".join([_HEADER.pack(flags, len(tokens)), *(plane.tobytes() for plane in planes)])


def decode(blob: bytes) -> tuple[IntArray, FloatArray, FloatArray | None]:
    """The arrays that `encode` was given, up to its documented rounding; ValueError if the blob is malformed."""
    if len(blob) < _HEADER.size:
        raise ValueError(f"a trajectory of {len(blob)} bytes has no header")
    flags, n = _HEADER.unpack_from(blob)
    wide, has_entropies = bool(flags & _WIDE_TOKENS), bool(flags & _HAS_ENTROPIES)
    expected = _HEADER.size + n * (5 + wide + 2 * has_entropies)
    if len(blob) != expected:
        raise ValueError(f"a trajectory of {n} tokens takes {expected} bytes, not {len(blob)}")
    tokens = np.frombuffer(blob, "<u2", n, _HEADER.size).astype(np.int32)
    if wide:
        tokens |= np.frombuffer(blob, np.uint8, n, expected - 2 * n).astype(np.int32) << 16
    bits = np.frombuffer(blob, "<u2", n, _HEADER.size + 2 * n).astype(np.uint32) << 16
    bits |= np.frombuffer(blob, np.uint8, n, expected - n).astype(np.uint32) << 8
    entropies = None
    if has_entropies:
        entropies = np.frombuffer(blob, "<f2", n, _HEADER.size + 4 * n).astype(np.float32)
    return tokens, bits.view(np.float32), entropies


def _check(tokens: IntArray, logprobs: FloatArray, entropies: FloatArray | None) -> None:
    """A sample checks itself when made, but may share memory with an engine: look again at what is stored."""
    if len(logprobs) != len(tokens):
        raise ValueError(f"logprobs: {len(tokens)} tokens but {len(logprobs)} log-probs")
    if len(tokens) == 0 or int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN:
        raise ValueError(f"tokens: ids must be from 0 to {MAX_TOKEN:,}, and at least one")
    if not np.isfinite(logprobs).all():
        raise ValueError("logprobs: NaN or infinite")
    if entropies is None:
        return
    if len(entropies) != len(tokens):
        raise ValueError(f"entropies: {len(tokens)} tokens but {len(entropies)} entropies")
    if not (np.abs(entropies) <= MAX_ENTROPY).all():  # written so that NaN fails it
        raise ValueError(f"entropies: NaN, or beyond {MAX_ENTROPY:,.0f}")


def _top_24(values: FloatArray) -> npt.NDArray[Any]:
    """The upper 24 bits of each float32, rounded to nearest; cut instead where rounding up would give infinity."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = (bits + np.uint32(0x80)) >> 8
    infinite = (rounded & 0x7F8000) == 0x7F8000
    return np.where(infinite, bits >> 8, rounded) if infinite.any() else rounded
