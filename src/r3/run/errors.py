"""The translation of a failed write into a line with numbers and the fix."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from r3.errors import RunError

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit (ulimit -f) is reached",
}


def write_failed(path: Path, error: OSError, wanted: str) -> RunError:
    """The error for a write to `path` that the system refused; `wanted` says what was being written."""
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
