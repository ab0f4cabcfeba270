"""Errors for the person at the keyboard: one line that names the file or setting and the fix, and an exit code.

Anything else that is raised is a bug: `r3` says so in a line and keeps the traceback in a file.
"""

from __future__ import annotations

from typing import ClassVar

FAILED, BAD_INPUT, DIVERGED = 1, 2, 3
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
"""Exit codes of a run that a signal stopped after a checkpoint."""


class R3Error(Exception):
    """An error whose message is meant to be read by the user; `r3` prints it and exits with `exit_code`."""

    exit_code: ClassVar[int] = FAILED


class ConfigError(R3Error, ValueError):
    """A recipe or an override that cannot be used; the message says which key and what to write instead."""

    exit_code = BAD_INPUT


class TaskError(R3Error, ValueError):
    """A task that cannot be used; the message names the setting and the fix."""

    exit_code = BAD_INPUT


class MissingData(TaskError):
    """A data set that is known, but not on this machine."""


class RunError(R3Error, RuntimeError):
    """One line that names the path and the fix. What was already in the run directory is untouched."""


class ViewError(R3Error, ValueError):
    """Something asked for of `r3 view` or `r3 show` that does not exist; the message names it and the fix."""

    exit_code = BAD_INPUT


class NotThere(LookupError):
    """A page asked for something that the run does not have; the message says what it has."""
