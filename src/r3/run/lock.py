"""One trainer at a time: the file `lock` of a run directory."""

from __future__ import annotations

from pathlib import Path

from r3.errors import RunError
from r3.locks import FileLock, Locked
from r3.run.errors import write_failed


def lock_run(path: Path) -> FileLock:
    """The lock, or a `RunError` that names who holds it."""
    try:
        return FileLock(path)
    except Locked as holder:
        raise RunError(
            f"{path.parent}: in use by {holder}; stop that process first, or choose another run.dir"
        ) from holder
    except OSError as error:
        raise write_failed(path, error, "the lock file") from error
