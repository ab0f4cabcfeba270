"""A training run's directory: its layout, who may write, and how a run is created, opened and rewound to a step.

config.yaml                 the resolved config
dataset.jsonl, heldout.jsonl  rows that were given from Python
run.json                    format, versions, seed, creation time, command line, resumes, ids at tracking services
metrics.jsonl               one line per step
rollouts/step-000012.jsonl.gz
checkpoints/step-000012/
buffer.sqlite               the sample buffer
tensorboard/
lock                        held while a process trains here
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import r3
from r3.errors import RunError
from r3.locks import FileLock, Locked
from r3.run.checkpoints import Checkpoints
from r3.run.disk import is_temporary, read_regular, remove_leftovers, write_atomically, write_failed
from r3.run.metrics import MetricsLog
from r3.run.rollouts import Rollouts

log = logging.getLogger(__name__)

FORMAT = 1
"""The version of run.json and of the layout above; raised when an older r3 could not read what a newer one wrote."""

DATASETS = ("dataset.jsonl", "heldout.jsonl")
"""Rows that were given from Python, training and held-out: written before the run begins."""

RESTORE = "mount or restore it as it was, or start a new run in another run.dir; nothing was changed"


class RunFiles:
    """The paths of a run's files, for readers: takes no lock and writes nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.info_path = self.path / "run.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.buffer_path = self.path / "buffer.sqlite"
        self.tensorboard_path = self.path / "tensorboard"
        self.lock_path = self.path / "lock"
        self.rollouts = Rollouts(self.path / "rollouts")
        self.checkpoints = Checkpoints(self.path / "checkpoints")

    def read_info(self) -> dict[str, Any]:
        """The content of run.json; refuses a directory that is no run, and a run of a newer format."""
        try:
            info = json.loads(read_regular(self.info_path))
            version = info["format"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(
                f"{self.path}: not a run directory (it has no run.json); give the run.dir of a run, or start one with "
                "r3 train"
            ) from error
        except OSError as error:
            raise RunError(f"{self.info_path}: cannot be read ({error.strerror}); check its permissions") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.info_path}: damaged ({error}); restore it from a backup") from error
        if version != FORMAT:
            raise RunError(
                f"{self.path}: written in format {version} by r3 {info.get('versions', {}).get('r3')}, this r3 "
                f"{r3.__version__} reads format {FORMAT}; install that version to go on with it"
            )
        return dict(info)

    def read_config(self) -> str:
        """The text of config.yaml."""
        try:
            return read_regular(self.config_path).decode()
        except (OSError, ValueError) as error:
            raise RunError(f"{self.config_path}: cannot be read ({error}); restore it from a backup") from error


def lock_run(path: Path) -> FileLock:
    """The lock of a run directory, one trainer at a time; a `RunError` names who holds it."""
    try:
        return FileLock(path)
    except Locked as holder:
        raise RunError(
            f"{path.parent}: in use by {holder}; stop that process first, or choose another run.dir"
        ) from holder
    except OSError as error:
        raise write_failed(path, error, "the lock file") from error


class RunDirectory(RunFiles):
    """A run directory that this process holds the lock of, from `create` or `open` to `close`."""

    def __init__(self, path: Path, lock: FileLock, info: Mapping[str, Any]) -> None:
        """Use `create` or `open`."""
        super().__init__(path)
        self.info = dict(info)
        self._lock = lock
        self.metrics = MetricsLog(self.metrics_path)  # its own lock holds even if someone removes the file `lock`
        try:
            self._tidy()
        except BaseException:
            self.metrics.close()
            raise

    @classmethod
    def create(cls, path: str | Path, config: str, *, seed: int, command: Sequence[str] | None = None) -> Self:
        """A new run in a new or empty directory. `config` is the resolved config as YAML text."""
        files = RunFiles(path)
        _refuse_foreign(files)
        lock = lock_run(files.lock_path)
        try:
            refuse_run(files.path)
            info = {
                "format": FORMAT,
                "created": _now(),
                "seed": seed,
                "command": list(sys.argv if command is None else command),
                "versions": versions(),
            }
            write_atomically(files.config_path, config.encode())
            write_atomically(files.info_path, _as_json(info))  # last: it makes the directory a run
            return cls(files.path, lock, info)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """An existing run, to resume it. Only temporary files of killed writes are removed."""
        files = RunFiles(path)
        files.read_info()
        lock = lock_run(files.lock_path)
        try:
            if not files.metrics_path.exists() and files.checkpoints.steps():
                raise RunError(f"{files.metrics_path}: missing, though there are checkpoints; {RESTORE}")
            return cls(files.path, lock, files.read_info())
        except BaseException:
            lock.release()
            raise

    def rewind(self, step: int, command: Sequence[str] | None = None, notes: Mapping[str, Any] | None = None) -> None:
        """Go back to `step`, whose checkpoint is being resumed: later metrics, rollouts and checkpoints are dropped.

        `notes` are kept with the resume in run.json. Steps count from 1; a run killed before its first checkpoint goes
        back to 0. The buffer rewinds itself. If it is killed half-way, the next resume does it again.
        """
        reached = max(self.reached or 0, self.metrics.last_step or 0)
        resume = {"at": _now(), "step": step, "command": list(sys.argv if command is None else command)}
        resume |= notes or {}
        now = versions()
        then = self.info.get("versions", {})
        changed = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
        if changed:
            log.warning("%s: resumed under other versions (%s); results may differ", self.path, ", ".join(changed))
            resume["versions"] = now
        self.update_info(reached=reached, resumes=[*self.info.get("resumes", []), resume])
        self.checkpoints.rewind(step)
        self.rollouts.rewind(step)
        self.metrics.rewind(step)

    @property
    def reached(self) -> int | None:
        """The furthest step reached before any rewind, which tracking services may have seen; None: never rewound."""
        reached = self.info.get("reached")
        return None if reached is None else int(reached)

    def update_info(self, **entries: Any) -> None:
        """Set entries of run.json."""
        info = {**self.info, **entries}
        write_atomically(self.info_path, _as_json(info))
        self.info = info

    def close(self) -> None:
        self.metrics.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tidy(self) -> None:
        try:
            remove_leftovers(self.path)
            self.checkpoints.clean()
            self.rollouts.clean()
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot clear up after a killed run ({error}); make the directory writable"
            ) from error


def make_folder(path: str | Path) -> None:
    """Make the folder of a new run; `RunError` if it cannot hold one. `create` does this too."""
    _refuse_foreign(RunFiles(path))
    refuse_run(path)


def check_folder(path: str | Path) -> None:
    """`RunError` if no new run can begin there. Creates nothing."""
    refuse_run(path)
    files, nearest = RunFiles(path), Path(path).absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise RunError(f"{nearest}: is a file, not a directory; choose another run.dir")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunError(f"{nearest}: may not be written; choose another run.dir, or make it writable")
    if files.path.is_dir():
        _refuse_entries(files, {entry.name for entry in files.path.iterdir() if not is_temporary(entry.name)})


def refuse_run(path: str | Path) -> None:
    """`RunError` if the directory already holds a run; for a check before a long start."""
    if RunFiles(path).info_path.exists():
        raise RunError(f"{path}: already holds a run; resume it with {resume_command(path)} or choose another run.dir")


def resume_command(path: str | Path) -> str:
    """What to type to go on with the run in that directory.

    >>> resume_command("runs/my run")
    "r3 train --resume 'runs/my run'"
    """
    return f"r3 train --resume {shlex.quote(str(path))}"


def versions() -> dict[str, str | None]:
    """Versions of packages that the numbers may depend on; None if not installed. Imports none of them."""
    return {"r3": r3.__version__, "python": platform.python_version()} | {
        package: _version(package) for package in ("torch", "transformers", "numpy")
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _refuse_foreign(files: RunFiles) -> None:
    """Make the directory, or check that it is empty, a run, or left by a `create` that was killed."""
    try:
        files.path.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in files.path.iterdir() if not is_temporary(path.name)}
    except FileExistsError as error:
        raise RunError(f"{files.path}: is a file, not a directory; choose another run.dir") from error
    except OSError as error:
        raise write_failed(files.path, error, "the run directory") from error
    _refuse_entries(files, names)


def _refuse_entries(files: RunFiles, names: set[str]) -> None:
    ours = {files.lock_path.name, files.config_path.name, *DATASETS}
    unfinished = bool(names & {files.lock_path.name, *DATASETS}) and names <= ours
    if names and not unfinished and files.info_path.name not in names:
        raise RunError(
            f"{files.path}: not empty and not a run directory ({len(names)} entries, among them {min(names)!r}); "
            "choose another run.dir"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _as_json(info: Mapping[str, Any]) -> bytes:
    return (json.dumps(info, indent=2, ensure_ascii=False) + "\n").encode()
