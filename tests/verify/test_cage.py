"""The cage with real faults: hung, bloated, crashed and killed workers, dead parents, forks, threads and Ctrl-C.

Covers r3.verify.forkserver.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from r3.verify import MathVerifier, VerifierError
from r3.verify.cage import Answer, Cage, CageSettings
from r3.verify.maths import MathSettings

ROOT = Path(__file__).parents[2]
ACT = "tests.verify.judges.act"


def ask(cage: Cage, *acts: str) -> list[Answer]:
    return [future.result() for future in cage.submit({"args": [act], "kwargs": {}} for act in acts)]


@pytest.fixture
def cage() -> Iterator[Cage]:
    with closing(Cage(CageSettings(ACT, workers=1, seconds=0.3, memory_mb=512, sealed=False))) as one:
        yield one


@pytest.mark.parametrize(
    ("act", "failed"),
    [
        ("hang", "timeout"),
        ("hang in C", "timeout"),
        ("bloat", "memory"),
        ("segfault", "crashed"),
        ("leave", "crashed"),
        ("raise", "error"),
        ("exit", "error"),
        ("say much", "error"),
        ("kill the fork server", "crashed"),
        ("kill the group", "crashed"),
        ("close everything", "crashed"),
    ],
)
def test_a_bad_case_loses_only_itself(cage: Cage, act: str, failed: str) -> None:
    answers = ask(cage, "fine", act, "fine", "fine", act, "fine")
    assert [answer.failed for answer in answers] == ["", failed, "", "", failed, ""]
    assert [answer.result for answer in answers if not answer.failed] == [1] * 4


def test_a_stopped_worker_is_ended_when_its_wall_time_is_over() -> None:
    with closing(Cage(CageSettings(ACT, workers=1, seconds=0.02, sealed=False))) as cage:
        assert [answer.failed for answer in ask(cage, "stop", "fine")] == ["timeout", ""]


def test_an_error_says_what_it_was(cage: Cage) -> None:
    assert ask(cage, "raise")[0].detail == "LookupError: no such thing"


def test_a_killed_worker_is_replaced_and_no_case_is_lost(cage: Cage) -> None:
    pid = ask(cage, "pid")[0].result
    os.kill(pid, signal.SIGKILL)
    answers = ask(cage, "fine", "pid", "fine")
    assert [answer.failed for answer in answers] == ["", "", ""]
    assert answers[1].result != pid


def test_a_killed_forkserver_is_replaced(cage: Cage) -> None:
    worker, server = (answer.result for answer in ask(cage, "pid", "fork server"))
    handle = os.pidfd_open(worker)
    os.kill(server, signal.SIGKILL)
    assert gone(handle)  # a worker dies with its fork server
    answers = ask(cage, "fine", "fork server")
    assert [answer.failed for answer in answers] == ["", ""]
    assert answers[1].result != server


def test_many_threads_share_the_workers(cage: Cage) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: ask(cage, "raise" if i % 3 else "fine")[0].failed, range(60)))
    assert answers == ["error" if i % 3 else "" for i in range(60)]


@pytest.mark.parametrize("act", ["read", "write", "connect", "run", "system", "fork"])
def test_a_sealed_worker_reaches_nothing(act: str) -> None:
    cage = Cage(CageSettings(ACT, workers=1))
    try:
        (answer, imports) = ask(cage, act, "import")
    finally:
        cage.close()
    assert answer.failed == "error"
    assert answer.detail.startswith("PermissionError")
    assert imports.result is True  # sympy loads parts of itself late


BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


def test_a_busy_machine_makes_no_right_answer_wrong() -> None:
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(min(32, 4 * (os.cpu_count() or 1)))]
    try:  # each case uses more than half of its processor time, and gets a fraction of a processor
        with closing(Cage(CageSettings("tests.verify.judges.work", workers=2, seconds=0.2, sealed=False))) as cage:
            answers = [future.result() for future in cage.submit({"args": [0.12], "kwargs": {}} for _ in range(6))]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert [answer.failed for answer in answers] == [""] * 6


def test_a_case_that_timed_out_is_tried_once_more_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cases = ["a", "b hangs", "c", "d", "e hangs", "f", "g", "h"]
    with closing(Cage(CageSettings("tests.verify.judges.logged", workers=2, seconds=0.3, sealed=False))) as cage:
        answers = [f.result() for f in cage.submit({"args": [case, str(log)], "kwargs": {}} for case in cases)]
    assert [answer.failed for answer in answers] == [""] * len(cases)
    lines = log.read_text().splitlines()
    for case in ("b hangs", "e hangs"):
        _, second = (i for i, line in enumerate(lines) if line == f"start {case}")
        assert lines[second + 1] == f"end {case}"  # nothing else started or ended meanwhile
        others = [line.partition(" ") for line in lines[:second]]
        ended = {name for verb, _, name in others if verb == "end"}
        assert {name for verb, _, name in others if verb == "start"} - ended <= {"b hangs", "e hangs"}


def test_a_keeper_survives_its_own_faults(cage: Cage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(cage, "fine")[0].result == 1
    with monkeypatch.context() as broken:
        broken.setattr(cage, "_run", lambda *_: 1 / 0)
        with pytest.raises(VerifierError, match="division by zero"):
            ask(cage, "fine")
    assert ask(cage, "fine")[0].result == 1


def test_closing_leaves_nothing_behind() -> None:
    cage = Cage(CageSettings(ACT, workers=2, seconds=2.0, sealed=False))
    pids = {ask(cage, "pid")[0].result, ask(cage, "fork server")[0].result}
    waiting = cage.submit({"args": [act], "kwargs": {}} for act in ["hang"] * 4)
    handles = [os.pidfd_open(pid) for pid in pids]
    cage.close()
    for handle in handles:
        assert gone(handle)
    assert all(future.done() for future in waiting)
    assert not [t for t in threading.enumerate() if t.name.startswith("r3-verify") and t in cage._keepers]
    with pytest.raises(VerifierError, match="closed"):
        ask(cage, "fine")


def gone(handle: int) -> bool:
    """Whether the process behind a pidfd ends (within a long limit that only a failure reaches)."""
    readable, _, _ = select.select([handle], [], [], 30)
    os.close(handle)
    return bool(readable)


@pytest.mark.parametrize(("settings", "fix"), [({"seconds": 3.0}, "2 s"), ({"workers": 0}, "at least 1")])
def test_settings_are_checked(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        CageSettings(ACT, **settings)


def test_a_target_that_cannot_be_loaded_is_an_error_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    cage = Cage(CageSettings("tests.verify.no_such_module.f", workers=1))
    try:
        with pytest.raises(VerifierError, match="no_such_module"):
            ask(cage, "fine")
    finally:
        cage.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


def test_one_verifier_serves_many_threads(verifier: MathVerifier) -> None:
    with ThreadPoolExecutor(8) as threads:
        rights = threads.map(
            lambda i: verifier.verify(rf"\boxed{{(x+{i})^2}}", f"x^2+{2 * i}x+{i * i + i % 2}").right, range(1, 33)
        )
        assert list(rights) == [i % 2 == 0 for i in range(1, 33)]


def test_sympy_cannot_evaluate_text_in_a_worker() -> None:
    cage = Cage(CageSettings("tests.verify.symbolic_judge.evaluate", workers=1, memory_mb=1024))
    try:
        number, code = ask(cage, "17", "1+1")
    finally:
        cage.close()
    assert number.result == "17"
    assert code.detail == "PermissionError: model text is never evaluated as code"


HUNG = r"\int_0^1 \frac{\sin(x^{x^x})}{x+\ln(1+x)} dx + "


def test_hung_answers_in_a_batch_cost_only_themselves() -> None:
    batch = [(rf"\boxed{{(x+{i})^2}}", f"x^2+{2 * i}x+{i * i}") for i in range(1, 20)]
    batch[3], batch[11] = (rf"\boxed{{{HUNG}1}}", "5"), (rf"\boxed{{{HUNG}2}}", "5")
    with MathVerifier(MathSettings(seconds=0.5)) as verifier:
        reasons = [verdict.reason for verdict in verifier.verify_many(batch)]
        assert [i for i, reason in enumerate(reasons) if reason == "timeout"] == [3, 11]
        assert verifier.counts() == {"match": 17, "timeout": 2}


def script(body: str) -> subprocess.Popen[str]:
    prelude = (
        "import os, sys, signal, threading, multiprocessing\nfrom r3.verify import MathVerifier\n"
        "RIGHT = (r'\\boxed{(x+1)^2}', 'x^2+2x+1')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + body], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_workers_end_when_their_user_is_killed() -> None:
    body = (
        "verifier = MathVerifier()\nverifier.verify(*RIGHT)\n"
        "child = os.fork()\n"  # holds a copy of every socket, and outlives its parent
        "if child == 0: signal.pause()\n"
        "cage = verifier._state._cage\nprint(child, cage._forkserver._process.pid, flush=True)\nsignal.pause()\n"
    )
    with script(body) as process:
        assert process.stdout is not None
        child, server = map(int, process.stdout.readline().split())
        workers = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        handles = [os.pidfd_open(int(pid)) for pid in (server, *workers)]
        assert workers
        process.kill()
        try:
            assert all(gone(handle) for handle in handles)
        finally:
            os.kill(child, signal.SIGKILL)


def test_forked_and_spawned_processes_have_their_own_workers() -> None:
    body = (
        "def work(verifier):\n    with verifier: assert verifier.verify(*RIGHT).right\n"
        "if __name__ == '__main__':\n"
        "    verifier = MathVerifier()\n    assert verifier.verify(*RIGHT).right\n"
        "    verifier._state._lock.acquire()\n"  # as another thread may hold it while forking
        "    child = multiprocessing.get_context('fork').Process(target=work, args=(verifier,))\n"
        "    child.start(); child.join(); verifier._state._lock.release()\n"
        "    import pickle\n    again = pickle.loads(pickle.dumps(verifier))\n"
        "    assert child.exitcode == 0 and verifier.verify(*RIGHT).right and again.verify(*RIGHT).right\n"
        "    again.close(); verifier.close(); print('done')\n"
    )
    with script(body) as process:
        assert process.communicate()[0] == "done\n"
        assert process.returncode == 0


def test_ctrl_c_in_the_group_does_not_reach_the_workers() -> None:
    body = (
        "seen = threading.Event()\nsignal.signal(signal.SIGINT, lambda *_: seen.set())\n"
        "verifier = MathVerifier()\nverifier.verify(*RIGHT)\npid = verifier._state._cage._forkserver._process.pid\n"
        "os.killpg(0, signal.SIGINT)\nassert seen.wait(30)\n"
        "assert verifier.verify(r'\\boxed{(x+2)^2}', 'x^2+4x+4').right\n"
        "assert verifier._state._cage._forkserver._process.pid == pid\nverifier.close(); print('done')\n"
    )
    with script(body) as process:
        assert process.communicate()[0] == "done\n"


def test_an_abandoned_verifier_takes_its_workers_along() -> None:
    verifier = MathVerifier()
    assert verifier.verify(r"\boxed{(x+1)^2}", "x^2+2x+1").right
    cage = verifier._state._cage
    assert cage is not None
    assert cage._forkserver._process is not None
    handle = os.pidfd_open(cage._forkserver._process.pid)
    del verifier, cage
    assert gone(handle)


def test_importing_the_room_loads_no_heavy_package() -> None:
    code = "import r3.verify, sys; print({'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
