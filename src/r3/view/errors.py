"""Errors for bad input; a damaged run is no error, it is shown with what is wrong."""

from __future__ import annotations

from r3.errors import BAD_INPUT, R3Error


class ViewError(R3Error, ValueError):
    """Bad input; the message names it and the fix."""

    exit_code = BAD_INPUT


class NotThere(LookupError):
    """A page asked for something that the run does not have; the message says what it has."""
