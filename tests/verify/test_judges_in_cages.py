"""Judges that start programs, talk out of turn or take the cage for theirs: `cage`, `forkserver`, `descendants`."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from r3.samples import Query
from r3.verify import FunctionJudge
from r3.verify.cage import Answer, Cage, CageSettings
from tests.verify import judges
from tests.verify.test_cage import gone

START = "tests.verify.judges.start"
FORGE = "tests.verify.judges.forge"


def ask(cage: Cage, act: str, **columns: str) -> Answer:
    return cage.submit([{"args": [act], "kwargs": columns}])[0].result()


@pytest.fixture
def starter() -> Iterator[Cage]:
    with closing(Cage(CageSettings(START, workers=1, seconds=0.3, sealed=False, processes=8))) as cage:
        yield cage


def test_programs_end_when_the_cage_is_closed(starter: Cage, tmp_path: Path) -> None:
    pids = [ask(starter, "detached").result, ask(starter, "", note=str(tmp_path / "note")).result]
    handles = [os.pidfd_open(pid) for pid in pids]
    starter.close()
    assert all(gone(handle) for handle in handles)


@pytest.mark.parametrize(("how", "failed"), [("and hang", "timeout"), ("and die", "crashed")])
def test_programs_end_with_their_worker(starter: Cage, tmp_path: Path, how: str, failed: str) -> None:
    detached = os.pidfd_open(ask(starter, "detached").result)
    note = tmp_path / "note"
    assert ask(starter, how, note=str(note)).failed == failed
    assert gone(detached)
    assert not Path(f"/proc/{note.read_text()}").exists()
    assert ask(starter, "", note=str(note)).failed == ""


def test_programs_end_even_when_the_fork_server_was_killed(starter: Cage) -> None:
    handle = os.pidfd_open(ask(starter, "detached").result)
    server = starter._forkserver._process
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    starter.close()
    assert gone(handle)


def test_programs_of_another_worker_are_left_alone(tmp_path: Path) -> None:
    with closing(Cage(CageSettings(START, workers=2, seconds=0.1, sealed=False))) as cage:
        first = cage.submit([{"args": ["detached"], "kwargs": {}}])[0].result().result
        worker = _ancestor(first)
        for i in range(2):  # one of the two workers hangs; whichever it is, only its own programs end
            hung = ask(cage, "and hang", note=str(tmp_path / str(i)))
            assert hung.failed == "timeout"
            assert Path(f"/proc/{first}").exists() == Path(f"/proc/{worker}").exists()


def _ancestor(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_too_many_processes_end_the_case(starter: Cage, tmp_path: Path) -> None:
    assert ask(starter, "many").failed == "processes"
    assert ask(starter, "", note=str(tmp_path / "note")).failed == ""


@pytest.mark.parametrize("what", [name for name in judges._FORGERIES if name != "nothing"])
def test_a_forged_reply_is_an_error_and_spoils_no_other_case(what: str) -> None:
    with closing(Cage(CageSettings(FORGE, workers=1, seconds=0.05, sealed=False))) as cage:
        cases = ["nothing", what, "nothing", "nothing"]
        answers = [f.result() for f in cage.submit({"args": [case], "kwargs": {}} for case in cases)]
    assert answers[1].result is not True
    assert answers[1].failed in ("error", "timeout")
    assert [(answer.result, answer.failed) for answer in answers if answer is not answers[1]] == [(False, "")] * 3


def test_a_judge_tells_what_its_function_did() -> None:
    judge = FunctionJudge(FORGE, caged=True, workers=2, seconds=0.3)
    with closing(judge), ThreadPoolExecutor(4) as threads:
        answers = ["nothing", "right", "many", "nothing"]
        verdicts = list(threads.map(lambda answer: judge.judge(Query("q", "?"), answer), answers))
    assert not any(verdict.right for verdict in verdicts)
    assert Counter(verdict.reason for verdict in verdicts) == {"different": 2, "error": 2}
