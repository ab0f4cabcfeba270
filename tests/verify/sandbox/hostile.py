"""Answers that are out for harm or for an unearned verdict, written against the issue's list and not against the code.

They stand in answers/*.txt, each below a line `### name`. CHEATS do not know what the tests expect and try to pass all
the same. REACHES know it, and give it only once they have done what no answer may do: a right verdict means that they
could. HOGS take what they can. All are to be wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]

# The function under test is secret(x); its values are in no answer.
SECRET_TESTS = [f"assert secret({key}) == {value}" for key, value in {1: 730151, 2: 118093, 3: 990467}.items()]
DOUBLE_TESTS = ["assert double(2) == 4", "assert double(-3) == -6", "assert double('ab') == 'abab'"]

# What each attempt may use. The way to Python's library may lead through the home directory: that much is no secret.
REACHING = f"""
import ctypes, os, pathlib, signal, socket, subprocess, sys
HOME, REPOSITORY, WAY = {str(Path.home())!r}, {str(ROOT)!r}, {os.__file__.split("/")!r}
c = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = c.syscall(*map(ctypes.c_long, numbers))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def text(word):
    return ctypes.addressof(ctypes.create_string_buffer(word))
def double(x):
"""


def _read(name: str) -> dict[str, str]:
    sections = (Path(__file__).parent / "answers" / f"{name}.txt").read_text(encoding="utf-8").split("### ")[1:]
    return {head: body for head, _, body in (section.partition("\n") for section in sections)}


def _reaching(attempt: str) -> str:
    return REACHING + "".join(f"    {line}\n" for line in attempt.splitlines()) + "    return 2 * x\n"


CHEATS = {
    **_read("cheats"),
    "holds a NUL": "def secret(x):\n    return '\x00'\x00",
    "holds half a character": "def secret(x):\n    return '\ud800'",
}
REACHES = {name: _reaching(attempt) for name, attempt in _read("reaches").items()}
HOGS = _read("hogs")
