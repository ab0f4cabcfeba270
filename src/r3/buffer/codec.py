"""A `Sample` as two rows and back: its fields under a checksum, and its arrays as one compact blob.

The blob takes 7 bytes per token for vocabularies below 65,536, else 8.

| array     | stored as                           | error                                                    |
|-----------|-------------------------------------|----------------------------------------------------------|
| tokens    | 16 bits, or 24 if any needs them    | none; ids must be below 2^24                             |
| logprobs  | float32 rounded to its top 24 bits  | at most 2^-16 of the value: 1.3e-4 at log-prob -8        |
| entropies | float16                             | at most 2^-11 of the value, or 2^-25 if that is more     |

Rounding is idempotent: what was decoded encodes to the same bytes, so a sample read, exported, imported and read again
never drifts. The sum of the log-probs of a response is off by at most 2^-16 of its absolute value.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r3.buffer.database import damaged
from r3.samples import CONTEXT_KINDS, PLAIN, Context, FloatArray, IntArray, Sample

# ------------------------------------------------------------------------ rows

_INSERT_SAMPLE = f"INSERT INTO samples VALUES ({', '.join('?' * 16)})"
_INSERT_ARRAYS = "INSERT INTO trajectories VALUES (?, ?)"
_SELECT = """
SELECT s.id, q.uid, s.step, s.epoch, s.policy_version, s.outcome, s.reward, s.reward_parts, s.truncated, s.reflection,
       s.shown, s.length, s.fingerprint, s.verdict, s.crc, s.evicted_at, t.arrays
FROM samples s LEFT JOIN queries q ON q.key = s.query LEFT JOIN trajectories t ON t.id = s.id
"""


class Stored(NamedTuple):
    sample: Sample
    evicted_at: int | None


def insert(
    db: sqlite3.Connection, sample: Sample, sample_id: int, query_key: int, evicted_at: int | None = None
) -> int:
    """Store one sample under `sample_id`, and return its checksum.

    ValueError or TypeError if it cannot be stored as it is.
    """
    arrays = encode(sample.tokens, sample.logprobs, sample.entropies)
    fields = _fields(sample)
    crc = _checksum((sample_id, sample.query_id, *fields), arrays)
    db.execute(_INSERT_SAMPLE, (sample_id, query_key, *fields, crc, evicted_at))
    db.execute(_INSERT_ARRAYS, (sample_id, arrays))
    return crc


def read(db: sqlite3.Connection, path: str, sample_id: int) -> Stored | None:
    """The sample under `sample_id`, evicted or not; None if there is none."""
    row = db.execute(_SELECT + "WHERE s.id = ?", (sample_id,)).fetchone()
    return None if row is None else _stored(path, row)


def newest_ids(where: Sequence[str], limit: int, *, distinct: bool) -> str:
    """The statement for the ids of a query's living samples under more conditions, newest first, -1 for all of them.

    With `distinct`, of equal responses only the newest.
    """
    column, group = ("MAX(id)", "GROUP BY fingerprint") if distinct else ("id", "")
    conditions = " AND ".join(["query = ?", "evicted_at IS NULL", *where])
    return (
        f"SELECT {column} AS newest FROM samples INDEXED BY alive_by_query WHERE {conditions} {group} "
        f"ORDER BY newest DESC LIMIT {limit}"
    )


def read_newest(db: sqlite3.Connection, path: str, ids: str, values: Iterable[Any]) -> list[Stored]:
    """The samples whose ids the statement `ids` selects, newest first."""
    # Read forwards, then turned round: a group lies together on disk, and the operating system only reads ahead. From a
    # cold cache this takes little more than half the time of reading backwards.
    rows = db.execute(_SELECT + f"WHERE s.id IN ({ids}) ORDER BY s.id", tuple(values))
    return [_stored(path, row) for row in rows][::-1]


def scan(db: sqlite3.Connection, path: str) -> Iterator[Stored]:
    """Every stored sample in order of id, evicted ones too."""
    for row in db.execute(_SELECT + "ORDER BY s.id"):
        yield _stored(path, row)


def _stored(path: str, row: tuple[Any, ...]) -> Stored:
    *fields, crc, evicted_at, arrays = row
    if not isinstance(arrays, bytes) or _checksum(tuple(fields), arrays) != crc:
        raise damaged(path, f"sample {fields[0]} does not match its checksum")
    tokens, logprobs, entropies = decode(arrays)
    number, uid, step, epoch, version, outcome, reward, parts, truncated, kind, shown, _, _, verdict = fields
    sample = Sample.trusted(  # checked when it was stored, and the same since, as the checksum says
        query_id=uid,
        tokens=tokens,
        logprobs=logprobs,
        entropies=entropies,
        finish="length" if truncated else "stop",
        outcome=None if outcome is None else bool(outcome),
        reward=reward,
        reward_parts=json.loads(parts),
        context=Context(CONTEXT_KINDS[kind], shown) if kind else PLAIN,
        policy_version=version,
        step=step,
        epoch=epoch,
        text=None,
        verdict=verdict,
        id=number,
    )
    return Stored(sample, evicted_at)


def _fields(sample: Sample) -> tuple[Any, ...]:
    """The columns from `step` to `verdict`: plain Python values, since engines leave numpy scalars in samples."""
    sample.query_id.encode()
    sample.verdict.encode()  # a lone surrogate cannot be stored as text: better to fail here, by name
    shown = sample.context.shown
    parts = {str(name): float(value) for name, value in sample.reward_parts.items()}
    return (
        _count(sample.step, "step"),
        _count(sample.epoch, "epoch"),
        _count(sample.policy_version, "policy_version"),
        None if sample.outcome is None else int(bool(sample.outcome)),
        float(sample.reward),
        json.dumps(parts, allow_nan=False),
        int(sample.truncated),
        CONTEXT_KINDS.index(sample.context.kind),
        None if shown is None else _count(shown, "context.shown"),
        len(sample),
        sample.fingerprint,
        sample.verdict,
    )


def _count(value: int, name: str) -> int:
    number = int(value)
    if number != value or not 0 <= number < 2**63:
        raise ValueError(f"{name} must be a whole number from 0 to 2^63 - 1, not {value!r}")
    return number


def _checksum(fields: tuple[Any, ...], arrays: bytes) -> int:
    text = "\0".join(map(str, fields))  # a damaged page may hold any type
    return zlib.crc32(arrays, zlib.crc32(text.encode("utf-8", "surrogatepass")))


# ---------------------------------------------------------------------- arrays

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
