"""The few kernel calls that Python has no function for. Each raises OSError with the call's name.

The system calls that an answer may make: a list of what Python needs; everything else is refused.

No new process, no program, no socket, no signal to another process, no look into one. Threads are allowed: they are
part of the process and end with it. The list is by name, with the numbers of x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
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


# ---------------------------------------------------------------------- seccomp


# name: (x86_64, aarch64); None where an architecture has no such call
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "stat": (4, None), "lstat": (6, None), "lseek": (8, 62), "mmap": (9, 222), "munmap": (11, 215),
    "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "pipe": (22, None), "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72), "poll": (7, None),
    "ppoll": (271, 73), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "sched_yield": (24, 124), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98), "futex_waitv": (449, 449),
    "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96), "open": (2, None),
    "openat": (257, 56), "creat": (85, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "readlink": (89, None),
    "readlinkat": (267, 78), "ftruncate": (77, 46), "truncate": (76, 45), "fsync": (74, 82),
    "fdatasync": (75, 83), "getrandom": (318, 278), "sysinfo": (99, 179), "uname": (63, 160), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153), "umask": (95, 166), "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "pause": (34, None), "restart_syscall": (219, 128),
    "membarrier": (324, 283), "close_range": (436, 436), "getcpu": (309, 168),
}  # fmt: skip
# Allowed if an argument fits: (numbers), which argument, the values it may have.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # is it a terminal, its size, bytes waiting, close on exec
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # not F_SETOWN and F_SETSIG, which have the kernel send signals
_CLONE, _IOCTL, _FCNTL, _PRCTL, _PRLIMIT = (56, 220), (16, 29), (72, 25), (157, 167), (302, 261)
_KILL, _TGKILL, _AFFINITY = (62, 129), (234, 131), (204, 123)
_NEWEST_KNOWN = 435  # clone3. A C library falls back to an older call only on "no such call"

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SECCOMP, _SET_MODE_FILTER = (317, 277), 1

Instruction = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


def calls_can_be_restricted() -> bool:
    return platform.machine() in _ARCHITECTURES


def restrict_calls() -> None:
    """Put this process, and the threads it will start, under the list, for good. Needs no privileges."""
    program = _program(os.getpid())
    array = (_Filter * len(program))(*(_Filter(*instruction) for instruction in program))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
    syscall(
        "seccomp", call, ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(0), ctypes.byref(_Program(len(program), array))
    )


def _program(pid: int) -> list[Instruction]:
    column, architecture = _ARCHITECTURES[platform.machine()]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), allow]
    program += _if_argument(_CLONE[column], 0, (CLONE_THREAD,), test=_ANY_BIT)
    program += _if_argument(_IOCTL[column], 1, _IOCTLS)
    program += _if_argument(_FCNTL[column], 1, _FCNTLS)
    program += _if_argument(_PRCTL[column], 0, (PR_SET_NAME, PR_GET_NAME))
    program += _if_argument(_PRLIMIT[column], 0, (0, pid))
    program += _if_argument(_AFFINITY[column], 0, (0, pid))
    program += _if_argument(_KILL[column], 0, (pid,)) + _if_argument(_TGKILL[column], 0, (pid,))
    return [*program, (_AT_LEAST, 0, 1, _NEWEST_KNOWN), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), refuse]


def _if_argument(number: int, argument: int, values: tuple[int, ...], test: int = _EQUAL) -> list[Instruction]:
    """Allow call `number` if the low half of an argument passes one of the tests; else refuse it."""
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        body += [(test, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    body.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return [(_EQUAL, 0, len(body), number), *body]
