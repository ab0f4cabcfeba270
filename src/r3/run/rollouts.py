"""`rollouts/step-000012.jsonl.gz`: the sampled rollouts of a step, one JSON object a line.

What a row holds is the caller's choice; `jsonl` documents how it is written.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from r3.run.errors import RunError, write_failed
from r3.run.files import remove_leftovers, step_name, step_of, write_atomically
from r3.run.jsonl import decode_line, encode_line

_SUFFIX = ".jsonl.gz"


class Rollouts:
    """The folder of them. Reading needs no lock: a file appears whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        path = self._path(step)
        # No time in the header, so that the same rows are the same bytes.
        data = gzip.compress(b"".join(encode_line(row) for row in rows), compresslevel=6, mtime=0)
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failed(path, error, f"{len(data):,} bytes") from error
        write_atomically(path, data)
        return path

    def read(self, step: int) -> Iterator[dict[str, Any]]:
        path = self._path(step)
        try:
            with gzip.open(path, "rb") as file:
                for line in file:
                    yield decode_line(line)
        except FileNotFoundError as error:
            raise RunError(f"{path}: no rollouts were kept for step {step}; kept are {self.steps()}") from error
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise RunError(f"{path}: damaged ({error}); delete it, the run does not need it to resume") from error

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        if not self.folder.is_dir():
            return []
        steps = (step_of(path.name) for path in self.folder.iterdir() if path.name.endswith(_SUFFIX))
        return sorted(step for step in steps if step is not None)

    def rewind(self, step: int) -> None:
        """Drop the rollouts of later steps: the resumed run writes them again."""
        for later in self.steps():
            if later > step:
                self._path(later).unlink()

    def clean(self) -> None:
        """Remove what a killed writer left. Only for the owner of the run's lock."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)

    def _path(self, step: int) -> Path:
        return self.folder / (step_name(step) + _SUFFIX)
