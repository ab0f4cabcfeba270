"""Landlock: which files a process may open, decided by the kernel without privileges (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from . import linux

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _READ_FILE | _READ_DIR
_FILE_ONLY = _WRITE_FILE | _READ_FILE | 1 << 14  # rights that a rule on a single file may name
# Highest file-system right by version: all known ones are forbidden unless a rule allows them.
_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}
_NET = 0b11  # bind and connect TCP (version 4)
_SCOPED = 0b11  # abstract sockets and signals (version 6)
_NEVER = _EXECUTE | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 15  # no devices, sockets, pipes or links


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("fs", "net", "scoped")]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """The kernel's Landlock version; 0 for none."""
    try:
        return linux.syscall("landlock", linux.LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A file descriptor of rules: read below some paths, read and write below others, nothing else."""
    abi = version()
    rights = _RIGHTS[min(abi, 5)] - 1
    handled = _Ruleset(rights, _NET if abi >= 4 else 0, _SCOPED if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = linux.syscall(
        "landlock", linux.LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(size), ctypes.c_uint(0)
    )
    for path in readable:
        _allow(rules, path, _READ)
    for path in writable:
        _allow(rules, path, rights & ~_NEVER)
    return rules


def restrict(rules: int) -> None:
    """Put this process under the rules, for good."""
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.syscall("landlock", linux.LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))


def _allow(rules: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY & (_RIGHTS[min(version(), 5)] - 1)
        rule = _Beneath(rights, handle)
        linux.syscall(
            "landlock", linux.LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint(0)
        )
    finally:
        os.close(handle)
