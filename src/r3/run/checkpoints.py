"""`checkpoints/step-000012/`: folders that exist complete or not at all.

This file knows nothing about models: the caller's writer saves whatever files it likes into a folder. That folder is
prepared under a temporary name, forced to the disk, sealed with a manifest of its files, and only then renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from r3.errors import RunError
from r3.run.disk import (
    FULL,
    read_regular,
    remove,
    remove_leftovers,
    step_name,
    step_of,
    sync,
    temporary,
    write_failed,
    write_synced,
)

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LARGE = 64 * 2**20
"""Files above this size (weights) are hashed in blocks by several threads, and verified only before a resume."""
BLOCK = 16 * 2**20

_PROBE_BYTES = 2**20
_SET_ASIDE = re.compile(r"\.(step-\d{6,})\.(replaced|pruned)-\d+")


class Checkpoint(NamedTuple):
    step: int
    path: Path


class Checkpoints:
    """The folder of checkpoints. Reading needs no lock; writing belongs to the owner of the run's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, writer: Callable[[Path], None]) -> Checkpoint:
        """Have `writer` fill a folder and make it the checkpoint of `step`, in place of an earlier one of that step."""
        final = self._path(step)
        with self._prepared(final) as partial:
            writer(partial)
            _seal(partial, step)
            aside = self._set_aside(final, "replaced") if final.exists() else None
            os.rename(partial, final)
            sync(self.folder)
        if aside:
            remove(aside)
        return Checkpoint(step, final)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is intact, or None if there are none at all. Logs why a newer one was skipped.

        Every byte of it is read: weights that changed by themselves would be trained on.

        Raises `RunError` if there are some and all are damaged: starting over would look like resuming.
        """
        damages = []
        for step in reversed(self.steps()):
            damage = self.damage(step, thorough=True)
            if damage is None:
                return Checkpoint(step, self._path(step))
            log.warning("%s: damaged, not used: %s", self._path(step), damage)
            damages.append(f"{step_name(step)}: {damage}")
        if damages:
            raise RunError(
                f"{self.folder}: no checkpoint is intact ({'; '.join(damages)}); restore one from a backup or start a "
                "new run in another run.dir"
            )
        return None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, intact or not, in order."""
        if not self.folder.is_dir():
            return []
        steps = (step_of(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(step for step in steps if step is not None)

    def damage(self, step: int, *, thorough: bool = False) -> str | None:
        """What is wrong with a step's checkpoint; None if it is intact. Large files are read only if `thorough`."""
        return _damage(self._path(step), thorough)

    def prune(self, keep: int) -> None:
        """Remove all that are older than the `keep` newest intact ones; damaged ones do not count as kept."""
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}: without one nothing can be resumed")
        kept = 0
        for step in reversed(self.steps()):
            if kept == keep:
                self._drop(step)
            elif self.damage(step) is None:
                kept += 1

    def rewind(self, step: int) -> None:
        """Remove intact checkpoints newer than `step`, which the run goes back to: they belong to a history it leaves.

        Damaged ones stay, in case someone wants to look at them; they are never used.
        """
        for later in self.steps():
            if later > step and self.damage(later) is None:
                log.info("%s: removed, as the run goes back to step %d", self._path(later), step)
                self._drop(later)

    def clean(self) -> None:
        """Clean up after a killed writer. Only for the owner of the run's lock."""
        if not self.folder.is_dir():
            return
        remove_leftovers(self.folder)
        for path in list(self.folder.iterdir()):
            match = _SET_ASIDE.fullmatch(path.name)
            if not match:
                continue
            home = self.folder / match[1]
            if match[2] == "replaced" and not home.exists():  # killed before its replacement was in place
                os.rename(path, home)
                log.info("%s: put back, as its replacement was never finished", home)
            else:
                remove(path)

    def _path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def _drop(self, step: int) -> None:
        # First out of sight: killed half-way through the removal, it must not look like a damaged checkpoint.
        remove(self._set_aside(self._path(step), "pruned"))

    def _set_aside(self, path: Path, why: str) -> Path:
        aside = path.with_name(f".{path.name}.{why}-{os.getpid()}")
        os.rename(path, aside)
        return aside

    @contextmanager
    def _prepared(self, final: Path) -> Iterator[Path]:
        """An empty folder to fill, removed again if anything fails; the error says how full the disk is."""
        partial = temporary(final)
        try:
            partial.mkdir(parents=True)
            yield partial
        except OSError as error:
            raise write_failed(final, error, _amount(partial)) from error
        except Exception as error:
            # torch and safetensors report a full disk in types and words of their own.
            failed = _write_error(error) or _refused_write(partial)
            if failed is None:
                raise
            raise write_failed(final, failed, _amount(partial)) from error
        finally:
            if partial.exists():
                _discard(partial)


def _discard(partial: Path) -> None:
    """Remove what a failed writer wrote and free its space now: torch keeps such files open after its error."""
    for path in _files(partial):
        if not path.is_symlink() and path.stat().st_nlink == 1:  # a linked file has other users
            os.truncate(path, 0)
    shutil.rmtree(partial)


def _amount(partial: Path) -> str:
    """How many bytes of a checkpoint were written, for the error message."""
    return f"the checkpoint (failed after {sum(path.stat().st_size for path in _files(partial)):,} bytes)"


def _write_error(error: Exception) -> OSError | None:
    """The failed write behind an error of torch or safetensors, recognised by its wording.

    After a large block was refused, a small one may still fit, so that a test write proves nothing.
    """
    text = str(error)
    number = re.search(r"os error (\d+)|Errno (\d+)", text)
    if number:
        code = int(number[1] or number[2])
        return OSError(code, os.strerror(code))
    if any(words in text for words in ("No space left", "inline_container", "iostream error")):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _refused_write(folder: Path) -> OSError | None:
    """The error of a small test write, if the disk is full."""
    probe = folder / ".probe"
    try:
        write_synced(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return error if error.errno in FULL else None
    finally:
        probe.unlink(missing_ok=True)
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _seal(folder: Path, step: int) -> None:
    """Force every file to the disk, then write the manifest that makes the folder a checkpoint."""
    files = {}
    for path in _files(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, **_digest(path)}
    manifest = {"step": step, "files": files}
    write_synced(folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync(path)  # its list of names


def _digest(path: Path) -> dict[str, str]:
    """SHA-256 of a small file; for a large one, BLAKE2b over the BLAKE2b of its blocks, by several threads."""
    size = path.stat().st_size
    if size <= LARGE:
        return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            blocks = threads.map(lambda offset: _block_digest(fd, offset), range(0, size, BLOCK))
            return {"blocks": hashlib.blake2b(b"".join(blocks), digest_size=32).hexdigest()}
    finally:
        os.close(fd)


def _block_digest(fd: int, offset: int) -> bytes:
    digest, end = hashlib.blake2b(digest_size=32), offset + BLOCK
    while offset < end and (piece := os.pread(fd, min(2**20, end - offset), offset)):
        digest.update(piece)
        offset += len(piece)
    return digest.digest()


def _damage(folder: Path, thorough: bool) -> str | None:
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
        expected = {name: (int(entry["bytes"]), dict(entry)) for name, entry in manifest["files"].items()}
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not one ({error!r})"
    for name, (size, entry) in expected.items():
        path = folder / name
        try:
            if path.exists() and not path.is_file():  # reading a pipe or a device in its place would not end
                return f"{name} is no file"
            if (actual := path.stat().st_size) != size:
                return f"{name} has {actual:,} bytes instead of {size:,}"
            # Earlier versions kept no digest of large files.
            looked_at = "sha256" in entry or (thorough and "blocks" in entry)
            if looked_at and any(entry.get(kind) != digest for kind, digest in _digest(path).items()):
                return f"{name} was changed (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
