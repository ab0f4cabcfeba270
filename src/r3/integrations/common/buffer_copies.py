"""The buffer in another trainer's run: one live file, held by one process, and a full copy in every checkpoint.

So a checkpoint can be moved, and resumed with any number of processes.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from r3.buffer import SampleBuffer

log = logging.getLogger(__name__)
FILE = "r3_buffer.sqlite"


def open_buffer(path: str, checkpoint: str | None, *, per_query: int | None, total: int | None) -> SampleBuffer:
    """The buffer of a new run (empty), or of a resumed one (as it was at the checkpoint in that folder)."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    source = None if checkpoint is None else os.path.join(checkpoint, FILE)
    if source is not None and not os.path.exists(source):
        raise FileNotFoundError(
            f"{source} is missing: {checkpoint} was not written with R³; start a new run from its weights instead"
        )
    _make_way(path, warn=source is None)
    if source is not None:
        shutil.copyfile(source, path)
    return SampleBuffer(path, per_query=per_query, total=total)


def _make_way(path: str, *, warn: bool) -> None:
    """Remove an earlier run's live file: as with a trainer's checkpoints, a new run in the folder writes over it."""
    if not os.path.exists(path):
        return
    SampleBuffer(path).close()  # refuses while another process still writes to it
    if warn:
        log.warning("%s: starts empty, the samples of an earlier run in it are removed", path)
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            os.remove(name)


def save_buffer(buffer: SampleBuffer, folder: str) -> None:
    """Copy the buffer into the checkpoint in `folder`; the copy appears whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, FILE)
    partial = target + ".partial"
    if os.path.exists(partial):
        os.remove(partial)
    buffer.copy(partial)
    os.replace(partial, target)
    newest = buffer.stats().newest_step
    if newest is not None:
        buffer.settle(newest)  # a resume starts from a copy, so the live file is never rewound


def prune_copies(home: str, pattern: str, *, needs: str) -> None:
    """Remove the copies in checkpoints under `home` that the trainer has deleted: those without `needs`."""
    for copy in Path(home).glob(f"{pattern}/{FILE}"):
        if not (copy.parent / needs).exists():
            copy.unlink()
