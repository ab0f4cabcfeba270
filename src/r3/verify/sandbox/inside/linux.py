"""The few kernel calls that Python has no function for. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_THREAD = 0x10000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME = 1, 4, 15, 16
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_X86 = platform.machine() == "x86_64"
_PIVOT_ROOT = 155 if _X86 else 41
_MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    return _checked(name, _libc.syscall(ctypes.c_long(number), *arguments))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _checked(f"mount on {target}", result)


def unmount(target: str) -> None:
    _checked(f"unmount {target}", _libc.umount2(target.encode(), MNT_DETACH))


def make_read_only(target: str) -> None:
    """A mount and all below it: read-only, no device files, no set-user-ID programs (Linux 5.12)."""
    attributes = _MountAttr(attr_set=MS_RDONLY | MS_NOSUID | MS_NODEV)
    syscall(
        "mount_setattr",
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def pivot_root(new: str, old: str) -> None:
    syscall("pivot_root", _PIVOT_ROOT, new.encode(), old.encode())


def prctl(option: int, value: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _checked("prctl", _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def die_with_parent(parent: int) -> None:
    """Be killed when the process that forked this one ends. Forgotten by the kernel when the user changes."""
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)  # it had ended before


def drop_capabilities() -> None:
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))
