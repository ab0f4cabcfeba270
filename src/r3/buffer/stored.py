"""A `Sample` as two rows and back, with a checksum over everything that is given back."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from r3.buffer import codec
from r3.buffer.errors import damaged
from r3.samples import PLAIN, Context, Sample

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
    arrays = codec.encode(sample.tokens, sample.logprobs, sample.entropies)
    fields = _fields(sample)
    crc = _checksum((sample_id, sample.query_id, *fields), arrays)
    db.execute(_INSERT_SAMPLE, (sample_id, query_key, *fields, crc, evicted_at))
    db.execute(_INSERT_ARRAYS, (sample_id, arrays))
    return crc


def read(db: sqlite3.Connection, path: str, sample_id: int) -> Stored | None:
    """The sample under `sample_id`, evicted or not; None if there is none."""
    row = db.execute(_SELECT + "WHERE s.id = ?", (sample_id,)).fetchone()
    return None if row is None else _stored(path, row)


def read_newest(db: sqlite3.Connection, path: str, ids: str, values: Iterable[Any]) -> list[Stored]:
    """The samples whose ids the statement `ids` selects, newest first."""
    # Read forwards, then turned round: a group lies together on disk, and the operating system only reads ahead. From a
    # cold cache this takes little more than half the time of reading backwards.
    found = db.execute(_SELECT + f"WHERE s.id IN ({ids}) ORDER BY s.id", tuple(values))
    return [_stored(path, row) for row in found][::-1]


def scan(db: sqlite3.Connection, path: str) -> Iterator[Stored]:
    """Every stored sample in order of id, evicted ones too."""
    for row in db.execute(_SELECT + "ORDER BY s.id"):
        yield _stored(path, row)


def _stored(path: str, row: tuple[Any, ...]) -> Stored:
    *fields, crc, evicted_at, arrays = row
    if not isinstance(arrays, bytes) or _checksum(tuple(fields), arrays) != crc:
        raise damaged(path, f"sample {fields[0]} does not match its checksum")
    tokens, logprobs, entropies = codec.decode(arrays)
    number, uid, step, epoch, version, outcome, reward, parts, truncated, reflection, shown, _, _, verdict = fields
    sample = Sample.trusted(  # checked when it was stored, and the same since, as the checksum says
        query_id=uid,
        tokens=tokens,
        logprobs=logprobs,
        entropies=entropies,
        finish="length" if truncated else "stop",
        outcome=None if outcome is None else bool(outcome),
        reward=reward,
        reward_parts=json.loads(parts),
        context=Context("reflection", shown) if reflection else PLAIN,
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
        int(sample.context.kind == "reflection"),
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
    text = "\0".join(map(str, fields))  # whatever a damaged page may hold has a text too
    return zlib.crc32(arrays, zlib.crc32(text.encode("utf-8", "surrogatepass")))
