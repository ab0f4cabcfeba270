"""Writes that a crash or a full disk cannot leave half-done, and the error message of one that fails.

Lines of JSON (`encode_line`) are strict JSON that any reader accepts, the same bytes for the same content. JSON has no
NaN and no infinity. A missing value (NaN, or None: the mean over no samples) is written as `null` and read back as NaN;
an infinity is written as the string "Infinity" or "-Infinity" and read back as a float.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from r3.errors import RunError

log = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"\..+\.tmp-\d+")


def step_name(step: int) -> str:
    """`step-000012`: sorts by name as by number up to a million steps; `step_of` reads longer ones too."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step a file or folder is named after, without its suffixes; None for any other name."""
    match = _STEP_NAME.fullmatch(name.split(".")[0])
    return int(match[1]) if match else None


def temporary(path: Path) -> Path:
    """Where `path` is prepared, next to it, so that a rename puts it in place at once."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed writers. Only for the owner of the run's lock."""
    for path in folder.iterdir():
        if is_temporary(path.name):
            log.info("removing %s, left by a write that was cut off", path)
            remove(path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> BinaryIO:
    """A file to read; OSError for a pipe, which nobody may ever write to, and for a device, which may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(fd, "rb")


def read_regular(path: Path, most: int = 64 * 2**20) -> bytes:
    """The content of a small regular file; OSError for a larger one."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
    return data


def write_all(fd: int, data: bytes) -> None:
    """`os.write` may take only a part, above all on a disk that is filling up."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`: after a crash there is either the old file or the new one, whole."""
    prepared = temporary(path)
    try:
        write_synced(prepared, data)
        os.replace(prepared, path)
        sync(path.parent)
    except OSError as error:
        failure = write_failed(path, error, f"{len(data):,} bytes")
        prepared.unlink(missing_ok=True)
        raise failure from error


class AppendFile:
    """A file that grows by whole records: each is on disk when `append` returns, or not in the file at all."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        self._durable = durable
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is refused at once
            self._fd: int | None = os.open(path, flags, 0o644)
        except OSError as error:
            raise write_failed(path, error, "an empty file") from error

    def append(self, record: bytes) -> None:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        start = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, record)
            if self._durable:
                os.fsync(self._fd)
        except OSError as error:
            # If even this fails, readers drop a last record that was cut off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise write_failed(self.path, error, f"{len(record):,} bytes") from error

    def truncate(self, size: int) -> None:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        os.ftruncate(self._fd, size)
        if self._durable:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit (ulimit -f) is reached",
}


def write_failed(path: Path, error: OSError, wanted: str) -> RunError:
    """The error for a failed write to `path`; `wanted` says what was being written."""
    reason = FULL.get(error.errno or 0)
    if reason is None:
        return RunError(
            f"{path}: cannot write {wanted} ({error.strerror or error}); nothing half-written was kept: check that "
            "the disk is healthy and the directory may be written, then go on with it (r3 train --resume)"
        )
    return RunError(
        f"{path}: cannot write {wanted}: {reason} ({free_bytes(path):,} bytes free); nothing half-written was kept: "
        "free some space, then go on with it (r3 train --resume)"
    )


def free_bytes(path: Path) -> int:
    """Bytes free on the file system that holds `path` or would hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


# ------------------------------------------------------------------- JSON lines


_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def encode_line(record: Mapping[str, Any], first: str = "") -> bytes:
    """The line for one record: the key `first` leads, the others follow sorted, so that equal records are equal bytes.

    >>> encode_line({"b": float("nan"), "a": [1, float("inf")], "step": 3}, first="step")
    b'{"step":3,"a":[1,"Infinity"],"b":null}\\n'
    """
    keys = sorted(record, key=lambda key: (key != first, key))
    plain = {key: _plain(record[key], key) for key in keys}
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of one line; ValueError for anything but a JSON object."""
    record = json.loads(line, parse_constant=_refuse)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return {key: _restored(value) for key, value in record.items()}


def _plain(value: Any, key: str) -> Any:
    """`value` in JSON's types; scalars of numpy and torch become numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name], f"{key}.{name}") for name in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{key!r} is a {type(value).__name__}; log numbers, texts, lists and mappings of them")


def _restored(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return _INFINITIES.get(value, value) if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
