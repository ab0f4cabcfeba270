"""The sandbox with real faults: killed workers and hosts, what answers leave behind, machines that cannot isolate.

Covers r3.verify.sandbox, r3.verify.sandbox.inside.zygote, r3.verify.sandbox.inside.walls,
r3.verify.sandbox.inside.linux.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from r3.verify import VerifierError
from r3.verify import sandbox as pool
from r3.verify.sandbox import Job, Sandbox, SandboxSettings

RIGHT = Job("def double(x):\n    return 2 * x", ["assert double(2) == 4"])


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(SandboxSettings(seconds=5, workers=1))
    yield box
    box.close()


def result(sandbox: Sandbox, code: str, *tests: str) -> str:
    """What the feedback says that `f()` gave."""
    outcome = sandbox.judge(Job(code, [*tests, "assert f() is Ellipsis"]))
    return outcome.feedback.rsplit("It got ", 1)[-1]


def test_the_next_answer_finds_an_empty_directory(sandbox: Sandbox) -> None:
    write = (
        "import os\ndef f():\n    os.makedirs('a/b/c')\n    open('a/b/c/d', 'w').write('x')\n    return os.listdir()"
    )
    assert result(sandbox, write) == "['a']"
    assert result(sandbox, "import os\ndef f():\n    return os.listdir()") == "[]"


def test_the_next_answer_finds_everything_as_it_was(sandbox: Sandbox) -> None:
    spoil = "import math, sys, os\nmath.pi = 3\nsys.modules['re'] = None\nos.environ['X'] = '1'\ndef f(): return 1"
    look = "import math, re, os\ndef f(): return [math.pi > 3.1, re.__name__, os.environ.get('X')]"
    assert result(sandbox, spoil) == "1"
    assert result(sandbox, look) == "[True, 're', None]"


def test_the_same_answer_gets_the_same_random_numbers(sandbox: Sandbox) -> None:
    draw = "import random\ndef f(): return [random.random(), hash('x')]"
    assert result(sandbox, draw) == result(sandbox, draw)


def test_no_environment_reaches_an_answer(sandbox: Sandbox) -> None:
    names = result(sandbox, "import os\ndef f(): return sorted(os.environ)")
    assert set(eval(names)) <= {"HOME", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONUTF8"}


def test_a_killed_worker_is_replaced_and_no_case_is_lost() -> None:
    box = Sandbox(SandboxSettings(workers=1))
    try:
        assert box.judge(RIGHT).reason == "pass"
        (first,) = launchers()
        os.kill(first, signal.SIGKILL)
        assert box.judge(RIGHT).reason == "pass"
        assert launchers() != [first]
    finally:
        box.close()


def test_closing_leaves_no_process_no_mount_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mounts = Path("/proc/self/mounts").read_text()
    box = Sandbox(SandboxSettings(workers=2, seconds=5))
    loop = Job("def double(x):\n    while True: pass", RIGHT.tests)

    def ask(job: Job) -> None:
        with contextlib.suppress(VerifierError):  # closed before its turn came
            box.judge(job)

    waiting = [threading.Thread(target=ask, args=(job,)) for job in (RIGHT, loop, loop, RIGHT)]
    for thread in waiting:
        thread.start()
    assert box.judge(RIGHT).reason == "pass"
    handles = [os.pidfd_open(pid) for launcher in launchers() for pid in (launcher, *descendants(launcher))]
    assert len(handles) >= 2
    box.close()
    for thread in waiting:
        thread.join()
    assert all(gone(handle) for handle in handles)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VerifierError, match="closed"):
        box.judge(RIGHT)


def test_a_killed_host_leaves_no_process() -> None:
    code = (
        "from r3.verify.sandbox import *\nbox = Sandbox(SandboxSettings(workers=1, seconds=60))\nbox.start()\n"
        "print('up', flush=True)\nbox.judge(Job('while True: pass', ['']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        handles = [os.pidfd_open(pid) for pid in descendants(host.pid)]
        assert len(handles) >= 2  # the launcher and its zygote
        host.kill()
        assert all(gone(handle) for handle in handles)


def test_a_forked_child_leaves_its_parents_workers_alone() -> None:
    from r3.samples import Query
    from r3.verify.code import CodeVerifier

    query = Query("q", "?", columns={"tests": list(RIGHT.tests)})
    with CodeVerifier(SandboxSettings(workers=1)) as verifier:
        assert verifier.judge(query, RIGHT.code).right
        child = os.fork()
        if child == 0:
            code = 1
            try:
                right = verifier.judge(query, RIGHT.code).right
                verifier.close()
                code = 0 if right else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert verifier.judge(query, RIGHT.code).right


def test_a_machine_without_isolation_is_refused_with_the_reasons_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_BOOT", pool._BOOT.replace("main(", _CRIPPLED + "main(", 1))
    box = Sandbox(SandboxSettings(workers=1))
    try:
        with pytest.raises(VerifierError, match=r"root: .*; user: .*; landlock: .*sandbox=none") as refusal:
            box.start()
        assert "\n" not in str(refusal.value)
        with pytest.raises(VerifierError, match="cannot isolate"):  # and it does not run code meanwhile
            box.judge(RIGHT)
    finally:
        box.close()


# A kernel that knows neither namespaces nor Landlock.
_CRIPPLED = """
from r3.verify.sandbox.inside import linux, walls
def refuse(flags): raise PermissionError(1, "unshare: Operation not permitted")
linux.unshare, walls.landlock_version = refuse, lambda: 0
"""


def test_walls_that_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leaky = "from r3.verify.sandbox.inside import linux\nlinux.restrict_calls = lambda: None\n"
    monkeypatch.setattr(pool, "_BOOT", pool._BOOT.replace("main(", leaky + "main(", 1))
    box = Sandbox(SandboxSettings(walls="landlock", workers=1))
    try:
        with pytest.raises(VerifierError, match="a confined process could still"):
            box.start()
    finally:
        box.close()


def test_without_walls_only_if_asked_for() -> None:
    box = Sandbox(SandboxSettings(walls="none", workers=1))
    try:
        assert box.start() == ["limits"]
        assert box.judge(RIGHT).reason == "pass"
        assert box.judge(Job(_DAEMON, RIGHT.tests)).reason == "pass"
        (launcher,) = launchers()
        assert len(descendants(launcher)) == 1  # the zygote alone
    finally:
        box.close()


_DAEMON = """
import os, time
def double(x):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    return 2 * x
"""


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"walls": "yes"}, "give one of auto"),
        ({"workers": 0}, "at least 1"),
        ({"seconds": 0}, "more than 0"),
        ({"memory_mb": 10}, "at least 128"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        SandboxSettings(**settings)


def launchers() -> list[int]:
    """This process's children that are sandbox workers."""
    return [pid for pid in children(os.getpid()) if b"r3.verify.sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def gone(handle: int) -> bool:
    """Whether the process behind a pidfd ends (within a long limit that only a failure reaches)."""
    readable, _, _ = select.select([handle], [], [], 30)
    os.close(handle)
    return bool(readable)
