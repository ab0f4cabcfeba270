"""`rollouts/step-000012.jsonl.gz`: the sampled rollouts of a step, one JSON object per line.

What a row holds is the caller's choice; `disk.encode_line` says how it is written. A file is a series of gzip members,
which `zcat` and `gzip.open` read as one: a member for the rows of each group, so that a reader can open one group
alone, and before them the table of contents, in the extra field of empty members (RFC 1952), where only `contents`
looks for it. Files without a table, which earlier versions wrote, are read all the same.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from r3.errors import RunError
from r3.run.disk import (
    decode_line,
    encode_line,
    open_regular,
    remove_leftovers,
    step_name,
    step_of,
    write_atomically,
    write_failed,
)

_SUFFIX = ".jsonl.gz"
_MAGIC, _HAS_EXTRA = b"\x1f\x8b\x08", 4
_FIELD = b"R3"
_HEAD = struct.Struct("<3sB6xH2sH")
"""The header of a member with our field: magic, flags; no time, no hints, no system; sizes and name of the field."""
_MOST = 65_000
"""Bytes of the table in one member: the extra field's own limit is 65,535."""
_EMPTY = b"\x03\x00" + bytes(8)
"""The end of a member without content: an empty deflate stream, its checksum and its length."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The table of contents of a step's file."""

    summaries: list[dict[str, Any]]
    """One per group, also for groups whose rows were not kept."""
    places: list[tuple[int, int] | None]
    """Offset and size of each group's member in the file; None where its rows were not kept."""


class Rollouts:
    """The folder of rollouts. Reading needs no lock: a file appears whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, rows: Iterable[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]] = ()) -> Path:
        """Write the rows; those with the same `group` must follow each other. `summaries[i]` describes group i."""
        path = self.path(step)
        members: dict[Any, bytes] = {}
        for group, of_group in itertools.groupby(rows, key=lambda row: row.get("group")):
            # No time in the header, so that the same rows are the same bytes.
            lines = b"".join(encode_line(row) for row in of_group)
            members[group] = gzip.compress(lines, compresslevel=6, mtime=0)
        body = b"".join(members.values()) or gzip.compress(b"", mtime=0)
        data = _table(summaries, members) + body if summaries else body
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failed(path, error, f"{len(data):,} bytes") from error
        write_atomically(path, data)
        return path

    def read(self, step: int) -> Iterator[dict[str, Any]]:
        path = self.path(step)
        try:
            with open_regular(path) as packed, gzip.open(packed) as file:
                for line in file:
                    yield decode_line(line)
        except FileNotFoundError as error:
            raise self._missing(step) from error
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise _damaged(path, error) from error

    def contents(self, step: int) -> Contents | None:
        """The file's table of contents, without reading any row; None if the file has none."""
        path = self.path(step)
        try:
            with open_regular(path) as file:
                packed, start = _packed_table(file)
            if not packed:
                return None
            table = json.loads(zlib.decompress(packed))
            places = [place and (start + place[0], place[1]) for place in table["places"]]
            return Contents(table["summaries"], places)
        except FileNotFoundError as error:
            raise self._missing(step) from error
        except (OSError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error

    def read_bytes(self, step: int, place: tuple[int, int]) -> bytes:
        """The raw lines of one group, given its place in the contents."""
        path, (offset, size) = self.path(step), place
        try:
            with open_regular(path) as file:
                file.seek(offset)
                member = file.read(size)
            if len(member) < size:
                raise EOFError(f"it ends within the group at byte {offset}")
            return gzip.decompress(member)
        except FileNotFoundError as error:
            raise self._missing(step) from error
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(path, error) from error

    def read_group(self, step: int, place: tuple[int, int]) -> list[dict[str, Any]]:
        """The rows of one group, given its place in the contents."""
        try:
            return [decode_line(line) for line in self.read_bytes(step, place).splitlines()]
        except ValueError as error:
            raise _damaged(self.path(step), error) from error

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        if not self.folder.is_dir():
            return []
        steps = (step_of(path.name) for path in self.folder.iterdir() if path.name.endswith(_SUFFIX))
        return sorted(step for step in steps if step is not None)

    def rewind(self, step: int) -> None:
        """Remove the rollouts of later steps, which the resumed run will write again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink()

    def clean(self) -> None:
        """Remove temporary files of killed writers. Only for the owner of the run's lock."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)

    def path(self, step: int) -> Path:
        """The file of that step, whether or not it exists."""
        return self.folder / (step_name(step) + _SUFFIX)

    def _missing(self, step: int) -> RunError:
        return RunError(f"{self.path(step)}: no rollouts were kept for step {step}; kept are {self.steps()}")


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: damaged ({error}); delete it, the run does not need it to resume")


def _table(summaries: Sequence[Mapping[str, Any]], members: Mapping[Any, bytes]) -> bytes:
    """The empty gzip members that carry the table. Places in it count from the end of these members."""
    ends = dict(zip(members, itertools.accumulate(map(len, members.values())), strict=True))
    places = [(ends[i] - len(members[i]), len(members[i])) if i in members else None for i in range(len(summaries))]
    line = encode_line({"summaries": list(summaries), "places": places})
    packed = zlib.compress(line, 6)
    pieces = [packed[at : at + _MOST] for at in range(0, len(packed), _MOST)]
    return b"".join(
        _HEAD.pack(_MAGIC, _HAS_EXTRA, len(piece) + 4, _FIELD, len(piece)) + piece + _EMPTY for piece in pieces
    )


def _packed_table(file: BinaryIO) -> tuple[bytes, int]:
    """The packed table at the start of a file, and where the rows begin; (b"", 0) if there is none."""
    packed, at = b"", 0
    while True:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return packed, at
        magic, flags, extra, name, size = _HEAD.unpack(head)
        if magic != _MAGIC or flags != _HAS_EXTRA or name != _FIELD or extra != size + 4:
            return packed, at
        packed += file.read(size)
        at = file.seek(len(_EMPTY), os.SEEK_CUR)
