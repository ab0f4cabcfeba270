"""Rows of a data file as mappings, whatever its format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r3.errors import TaskError


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .jsonl.gz, .json or .parquet file.

    JSON lines are read one at a time and end at line feeds only: a problem's text may hold U+2028 and other characters
    that `str.splitlines` takes for the end of a line.
    """
    if not path.is_file():
        raise TaskError(f"no file {path}; give the path of a JSONL, JSON or Parquet file")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".json":
        for number, row in enumerate(_parsed(path.read_bytes(), str(path)), 1):
            yield _object(row, f"{path}, row {number}")
    else:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield _object(_parsed(line, where), where)


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TaskError(f"{path} needs pyarrow: pip install 'r3-rl[parquet]'") from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON ({error}); every line must be one object") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a {type(row).__name__}, not an object with named columns")
    return row
