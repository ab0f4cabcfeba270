"""The whole buffer as one file that other tools read: `.jsonl`, `.jsonl.gz` or `.parquet`, by its suffix.

There is one record per sample, in order of id, evicted ones included (`evicted_at` is not null). The header before
them (the first line; in Parquet, the file's metadata under `r3`) holds what samples do not: query order, ledger and
totals. So an import gives back the same buffer, down to ids, rates, and how far it can be rewound. Memory does not grow
with the number of tokens.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from r3.buffer import codec, database, notes, totals
from r3.buffer.database import SampleBufferError
from r3.buffer.totals import Totals
from r3.samples import Context, Sample

_FORMAT, _VERSION = "r3-samples", 1
_PARQUET_ROWS = 512  # a row group: about 12 MB of arrays at 2,000 tokens

_Record = dict[str, Any]
_NUMBER = (int, float)
_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (int,),
    "query_id": (str,),
    "step": (int,),
    "epoch": (int,),
    "policy_version": (int,),
    "outcome": (bool, type(None)),
    "reward": _NUMBER,
    "reward_parts": (dict,),
    "finish": (str,),
    "context": (str,),
    "shown": (int, type(None)),
    "verdict": (str,),
    "evicted_at": (int, type(None)),
    "tokens": (list,),
    "logprobs": (list,),
    "entropies": (list, type(None)),
}


_UNBINDABLE = (sqlite3.InterfaceError, sqlite3.ProgrammingError)  # Python 3.11 raises the one, 3.12 the other


# ---------------------------------------------------------------------- export


def export(db: sqlite3.Connection, path: str, target: str) -> int:
    """Write all to `target`, which appears under its name only when it is complete."""
    write = _by_suffix(target, _write_jsonl, _write_parquet)
    part = f"{target}.part"
    counted = _Counted(codec.scan(db, path))
    try:
        write(part, target.endswith(".gz"), _header(db), counted)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        raise SampleBufferError(
            f"{target}: export failed ({error.strerror or error}); free space or choose another directory and export "
            "again, the buffer is untouched"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    database.sync_directory(target)
    return counted.n


class _Counted:
    """An iterator that remembers how many it gave."""

    def __init__(self, items: Iterable[codec.Stored]) -> None:
        self._items = iter(items)
        self.n = 0

    def __iter__(self) -> Iterator[codec.Stored]:
        for item in self._items:
            self.n += 1
            yield item


def _header(db: sqlite3.Connection) -> _Record:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "queries": [row[0] for row in db.execute("SELECT uid FROM queries ORDER BY key")],
        "attempts": [list(row) for row in db.execute("SELECT query, reflection, step, tried, solved FROM attempts")],
        "steps": [list(row) for row in db.execute("SELECT * FROM steps ORDER BY step")],
        "settled": list(db.execute("SELECT step, rows FROM settled").fetchone()),
        "digests": totals.digests(db),
        **notes.exported(db),
    }


def _record(row: codec.Stored) -> _Record:
    sample = row.sample
    return {
        "id": sample.id,
        "query_id": sample.query_id,
        "step": sample.step,
        "epoch": sample.epoch,
        "policy_version": sample.policy_version,
        "outcome": sample.outcome,
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "finish": sample.finish,
        "context": sample.context.kind,
        "shown": sample.context.shown,
        "verdict": sample.verdict,
        "evicted_at": row.evicted_at,
        "tokens": sample.tokens.tolist(),
        "logprobs": sample.logprobs,
        "entropies": sample.entropies,
    }


def _write_jsonl(part: str, compressed: bool, header: _Record, samples: Iterable[codec.Stored]) -> None:
    with _open_text(part, "wt", compressed) as file:
        file.write(json.dumps(header) + "\n")
        for row in samples:
            record = _record(row)
            for name in ("logprobs", "entropies"):
                if record[name] is not None:  # six digits name a stored value exactly: it has 16 bits or fewer
                    record[name] = [float(f"{value:.6g}") for value in record[name].tolist()]
            file.write(json.dumps(record, allow_nan=False) + "\n")


def _write_parquet(part: str, _: bool, header: _Record, samples: Iterable[codec.Stored]) -> None:
    arrow, parquet = _arrow(part)
    whole, array = arrow.int64(), arrow.list_(arrow.float32())
    types = dict.fromkeys(_FIELDS, whole) | {
        "query_id": arrow.string(),
        "outcome": arrow.bool_(),
        "reward": arrow.float64(),
        "reward_parts": arrow.string(),
        "finish": arrow.string(),
        "context": arrow.string(),
        "verdict": arrow.string(),
        "tokens": arrow.list_(arrow.int32()),
        "logprobs": array,
        "entropies": array,
    }
    described = arrow.schema(list(types.items()), metadata={b"r3": json.dumps(header).encode()})
    records = (_record(row) for row in samples)
    with parquet.ParquetWriter(part, described, compression="zstd") as writer:
        while batch := list(itertools.islice(records, _PARQUET_ROWS)):
            for record in batch:
                record["reward_parts"] = json.dumps(record["reward_parts"])
            writer.write_table(arrow.Table.from_pylist(batch, schema=described))


# ---------------------------------------------------------------------- import


def import_(db: sqlite3.Connection, source: str) -> int:
    """Fill the empty buffer from `source`; the caller's transaction undoes everything if a record is bad."""
    read = _by_suffix(source, _read_jsonl, _read_parquet)
    if not os.path.isfile(source):
        raise SampleBufferError(f"{source}: no such file; check the path")
    header, records = read(source)
    _restore_tables(db, source, header)
    keys = {uid: key for key, uid in enumerate(header["queries"], 1)}
    last_id, n = 0, 0
    for where, record in records:
        try:
            sample = _sample(record, keys, last_id)
            codec.insert(db, sample, record["id"], keys[sample.query_id], record["evicted_at"])
        except (ValueError, TypeError, OverflowError) as error:
            raise SampleBufferError(
                f"{source}: {where}: {error}; repair or export it again, nothing was imported"
            ) from error
        last_id, n = record["id"], n + 1
    wrong = totals.disagreement(db)
    if wrong is not None:
        raise SampleBufferError(
            f"{source}: its {n} samples do not add up to its header ({wrong}): it was cut or edited; export it again, "
            "nothing was imported"
        )
    return n


def _restore_tables(db: sqlite3.Connection, source: str, header: _Record) -> None:
    try:
        db.executemany("INSERT INTO queries VALUES (?, ?)", list(enumerate(header["queries"], 1)))
        db.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?)", header["attempts"])
        for row in header["steps"]:
            totals.save(db, Totals(*row))
        db.execute("UPDATE settled SET step = ?, rows = ?", header["settled"])
        for step, digest in header.get("digests", []):  # exports of earlier versions have none
            db.execute("INSERT INTO digests VALUES (?, ?)", (step, bytes.fromhex(digest)))
        notes.restore(db, header)
    except (KeyError, TypeError, ValueError, sqlite3.IntegrityError, *_UNBINDABLE) as error:
        raise SampleBufferError(
            f"{source}: the header is incomplete or wrong ({error!r}); export it again, nothing was imported"
        ) from error


def _sample(record: Any, keys: dict[str, int], last_id: int) -> Sample:
    if not isinstance(record, dict):
        raise ValueError(f"a record must be an object, not {type(record).__name__}")
    for name, kinds in _FIELDS.items():
        if name not in record:
            raise ValueError(f"field {name!r} is missing")
        value = record[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(
                f"field {name!r} must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r:.60}"
            )
    if record["query_id"] not in keys:
        raise ValueError(f"field 'query_id' is {record['query_id']!r:.60}, which the header does not list")
    if record["id"] <= last_id:
        raise ValueError(f"field 'id' is {record['id']} after {last_id}; ids must rise")
    return Sample(
        query_id=record["query_id"],
        tokens=record["tokens"],
        logprobs=record["logprobs"],
        entropies=record["entropies"],
        finish=record["finish"],
        outcome=record["outcome"],
        reward=float(record["reward"]),
        reward_parts=record["reward_parts"],
        context=Context(record["context"], record["shown"]),
        policy_version=record["policy_version"],
        step=record["step"],
        epoch=record["epoch"],
        verdict=record["verdict"],
    )


_Records = Iterator[tuple[str, _Record]]  # each with the line or row it stands in


def _read_jsonl(source: str) -> tuple[_Record, _Records]:
    lines = _lines(source)
    try:
        _, header = next(lines)
    except StopIteration:
        raise SampleBufferError(f"{source}: empty; export it again") from None
    return _check_header(source, header), lines


def _lines(source: str) -> _Records:
    number = 0
    try:
        with _open_text(source, "rt", source.endswith(".gz")) as file:
            for number, line in enumerate(file, 1):
                yield f"line {number}", json.loads(line)
    except (ValueError, EOFError, OSError, zlib.error) as error:  # JSON and UTF-8 errors are ValueErrors
        raise SampleBufferError(
            f"{source}: line {max(number, 1)} cannot be read ({error}); repair or export it again, nothing was imported"
        ) from error


def _read_parquet(source: str) -> tuple[_Record, _Records]:
    arrow, parquet = _arrow(source)
    try:
        file = parquet.ParquetFile(source)
        header = json.loads((file.schema_arrow.metadata or {}).get(b"r3", b"null"))
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise SampleBufferError(f"{source}: not a Parquet export of a buffer ({error}); export it again") from error
    return _check_header(source, header), _parquet_records(source, file, arrow)


def _parquet_records(source: str, file: Any, arrow: Any) -> _Records:
    number = 0
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for record in batch.to_pylist():
                number += 1
                with contextlib.suppress(KeyError, TypeError):  # a missing or odd field is named by the reader
                    record["reward_parts"] = json.loads(record["reward_parts"])
                yield f"row {number}", record
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise SampleBufferError(
            f"{source}: after row {number} it cannot be read ({error}); export it again, nothing was imported"
        ) from error


def _check_header(source: str, header: Any) -> _Record:
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise SampleBufferError(
            f"{source}: does not start with a header of format {_FORMAT!r}; use a file made by export"
        )
    if header.get("version") != _VERSION:
        raise SampleBufferError(
            f"{source}: export version {header.get('version')!r}, this r3 knows {_VERSION}; upgrade r3 to read it"
        )
    return header


# ----------------------------------------------------------------------- files


def _by_suffix(path: str, jsonl: Callable[..., Any], parquet: Callable[..., Any]) -> Callable[..., Any]:
    if path.endswith((".jsonl", ".jsonl.gz")):
        return jsonl
    if path.endswith(".parquet"):
        return parquet
    raise SampleBufferError(f"{path}: unknown suffix; use .jsonl, .jsonl.gz or .parquet")


def _open_text(path: str, mode: str, compressed: bool) -> IO[Any]:
    opener: Callable[..., IO[Any]] = gzip.open if compressed else open
    return opener(path, mode, encoding="utf-8")


def _arrow(path: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SampleBufferError(
            f"{path}: Parquet needs pyarrow; pip install 'r3-rl[parquet]', or use .jsonl"
        ) from error
    return pyarrow, pyarrow.parquet
