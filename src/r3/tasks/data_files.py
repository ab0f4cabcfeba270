"""Rows of a data file as mappings, whatever its format."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r3.errors import TaskError


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .jsonl.gz, .json, .csv or .parquet file.

    JSON lines are read one at a time and end at line feeds only: a problem's text may hold U+2028 and other characters
    that `str.splitlines` takes for the end of a line.
    """
    try:
        there = path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        there = False
    if not there:
        raise TaskError(f"no file {path}; give the path of a JSONL, JSON, CSV or Parquet file")
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".json":
            yield from _json(path)
        elif path.suffix == ".csv":
            yield from _csv(path)
        else:
            yield from _json_lines(path)
    except (OSError, EOFError, zlib.error) as error:  # a broken .gz raises any of the three
        reason = getattr(error, "strerror", None) or error
        raise TaskError(
            f"{path}: cannot be read ({reason}); it is damaged or cut off: get the whole file again"
        ) from error


def _json(path: Path) -> Iterator[dict[str, Any]]:
    rows = _parsed(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise TaskError(
            f"{path}: a {type(rows).__name__}, not a list of rows; or name it .jsonl if it has one per line"
        )
    for number, row in enumerate(rows, 1):
        yield _object(row, f"{path}, row {number}")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _object(_parsed(line, where), where)


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Named by the first line; every value is a text, and an empty one is none."""
    csv.field_size_limit(2**27)  # a text may be longer than the 128 kB that the module takes for a mistake
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if len(set(names)) < len(names) or not all(names):
                raise TaskError(f"{path}: its first line must name every column, each once; it says {', '.join(names)}")
            for row in reader:
                if None in row or None in row.values():
                    raise TaskError(
                        f"{path}, line {reader.line_num}: not the {len(names)} columns that the first line names; "
                        'put texts with commas or line ends between quotes (")'
                    )
                yield {name: value or None for name, value in row.items()}
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: not CSV in UTF-8 ({error}); mend it, or write JSON lines") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TaskError(f"{path} needs pyarrow: pip install 'r3-rl[parquet]'") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, ValueError) as error:
        raise TaskError(
            f"{path}: not a whole Parquet file ({' '.join(str(error).split())[:200]}); get it again"
        ) from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
        raise TaskError(f"{where}: not JSON ({error}); every line must be one object") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a {type(row).__name__}, not an object with named columns")
    return row
