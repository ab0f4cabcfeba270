"""The one error this room raises for bad input; damaged runs are shown with what is wrong about them instead."""

from __future__ import annotations

from r3.errors import BAD_INPUT, R3Error


class ViewError(R3Error, ValueError):
    """One line that names what was asked for and the fix."""

    exit_code = BAD_INPUT


class NotThere(LookupError):
    """A page was asked for something that the run does not hold; the message says what is there instead."""
