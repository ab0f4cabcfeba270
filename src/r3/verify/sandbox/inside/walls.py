"""The walls round an answer, by what the machine offers.

`root` and `user` build a new root directory in namespaces of its own: a small file system in memory with Python's
library, read-only, and an empty scratch directory. `root` needs CAP_SYS_ADMIN, `user` an unprivileged user namespace.
`landlock` has neither: the kernel keeps the process from opening anything but Python's library. `none` has no walls.
Limits and, but for `none`, the list of system calls come on top in every answer's own process.

With Landlock (`ruleset`, `restrict_files`) the kernel decides which files a process may open, without privileges
(Linux 5.13).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from . import linux

_NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_NOBODY = 65534
_UNUSED_USERS = 0x70000000  # plus a process id: a user whom nothing on the machine belongs to
_BASE, _OLD = "/tmp", "/old"  # any existing directory; the old root's place in the new one, for a moment
_ROOM = "/room"
SCRATCH = f"{_ROOM}/scratch"
_DEVICES = ("/dev/null", "/dev/urandom")
_PACKAGES = ("site-packages", "dist-packages")
_LANDLOCK_ALONE = 3  # the first version that guards truncation
_TASKS = 64  # threads of all the answers of a verdict


@cache
def library() -> list[str]:
    """The directories of Python's own library: all that an answer may read."""
    return [path for path in sys.path if os.path.isdir(path)]


def enter_namespaces(mode: str) -> str:
    """Leave the machine's namespaces, as the mode asks. Returns what was done. PIDs change at the next fork."""
    if mode not in ("root", "user"):
        return ""
    user, group = os.geteuid(), os.getegid()
    if mode == "root":
        linux.unshare(_NAMESPACES)
        return "mount, PID, network, IPC and UTS namespaces"
    linux.unshare(_NAMESPACES | linux.CLONE_NEWUSER)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return "user, mount, PID, network, IPC and UTS namespaces"


def build_root(scratch_mb: int) -> str:
    """Make the new root directory, move into it and detach the old one. Returns what was done."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", _BASE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    folders = library()
    os.mkdir(_BASE + _OLD)
    linux.pivot_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for path in folders:
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):  # else it lies below one that is there already
            linux.mount(_OLD + path, path, None, linux.MS_BIND | linux.MS_REC)
            linux.make_read_only(path)
            for name in _PACKAGES:
                if os.path.isdir(f"{path}/{name}"):
                    linux.mount("tmpfs", f"{path}/{name}", "tmpfs", linux.MS_RDONLY, "size=4k,nr_inodes=1")
    os.mkdir("/dev")
    for path in _DEVICES:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        linux.mount(_OLD + path, path, None, linux.MS_BIND)
    os.makedirs(SCRATCH)
    linux.unmount(_OLD)
    os.rmdir(_OLD)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("none", "/", None, flags)
    mount_scratch(scratch_mb)
    os.chdir(SCRATCH)
    return "a root directory with Python's library alone, read-only, and a scratch directory in memory"


def mount_scratch(megabytes: int) -> None:
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("tmpfs", SCRATCH, "tmpfs", flags, f"size={megabytes}m,nr_inodes=1k,mode=777")


def empty_scratch(megabytes: int) -> None:
    """A new scratch directory if the last answer left anything in it. Nothing runs that could hold the old one."""
    os.chdir("/")
    if os.listdir(SCRATCH):
        linux.unmount(SCRATCH)
        mount_scratch(megabytes)
    os.chdir(SCRATCH)


def landlock_rules(mode: str) -> int | None:
    """Rules for the answers' processes; None where the kernel has none and namespaces do without."""
    if mode == "none":
        return None
    if mode == "landlock":
        if landlock_version() < _LANDLOCK_ALONE:
            raise OSError(f"Landlock version {landlock_version()}: without namespaces {_LANDLOCK_ALONE} is needed")
        entries = [f"{path}/{name}" for path in library() for name in os.listdir(path) if name not in _PACKAGES]
        return ruleset([*entries, *_DEVICES], [os.devnull])
    return ruleset(["/"], [_ROOM, os.devnull]) if landlock_version() else None


def unused_user() -> int:
    return _UNUSED_USERS + os.getpid()


def change_user(mode: str, user: int) -> None:
    """From root to a user of no one's, if that user can still reach Python's library.

    In `user` mode there is nothing to give up: root there is root in its namespace alone.
    """
    if os.geteuid() == 0 and (mode == "root" or (mode == "landlock" and _reachable())):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


@cache
def _reachable() -> bool:
    return all(parent.stat().st_mode & 1 for path in library() for parent in (Path(path), *Path(path).parents))


def confine(mode: str, rules: int | None, *, seconds: float, memory_mb: int, file_kb: int, files: int) -> None:
    """The last walls, in a process that is about to run an answer or its tests."""
    megabyte = 2**20
    cpu = math.ceil(seconds) + 1  # the tests' process looks at the time; this is for when nothing does
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    for name, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mb * megabyte),
        (resource.RLIMIT_FSIZE, file_kb * 1024),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (value, value))
    if mode == "none":
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (_TASKS, _TASKS))
    linux.drop_capabilities()
    if rules is not None:
        restrict_files(rules)
    linux.restrict_calls()


def probe(outside: Sequence[str]) -> list[str]:
    """Try in a confined process what an answer must not be able to do. Returns what succeeded."""
    way = {part for path in library() for part in path.split("/")}  # those on the path to the library stay visible
    attempts: dict[str, Callable[[], object]] = {
        "open a socket": socket.socket,
        "start a process": lambda: os.fork() or os._exit(0),
        "signal another process": lambda: os.kill(os.getppid() or 1, 0),
        "run a program": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
        "write outside its scratch directory": lambda: os.open("/r3-probe", os.O_CREAT | os.O_WRONLY),
        "see processes": lambda: os.listdir("/proc/self"),
        "change Python's library": lambda: os.truncate(f"{library()[0]}/os.py", 2**40),
        **{f"list {path}": partial(_unexpected, path, way) for path in outside},
    }
    done = []
    for name, attempt in attempts.items():
        with contextlib.suppress(OSError):
            attempt()
            done.append(name)
    return done


def _unexpected(path: str, way: set[str]) -> None:
    if not set(os.listdir(path)) - way:
        raise FileNotFoundError(path)


# --------------------------------------------------------------------- Landlock


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


def landlock_version() -> int:
    """The kernel's Landlock version; 0 for none."""
    try:
        return linux.syscall("landlock", linux.LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A file descriptor of rules: read below some paths, read and write below others, nothing else."""
    abi = landlock_version()
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


def restrict_files(rules: int) -> None:
    """Put this process under the rules, for good."""
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.syscall("landlock", linux.LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))


def _allow(rules: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY & (_RIGHTS[min(landlock_version(), 5)] - 1)
        rule = _Beneath(rights, handle)
        linux.syscall(
            "landlock", linux.LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint(0)
        )
    finally:
        os.close(handle)
