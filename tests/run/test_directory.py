"""The run directory: made once, held by one process, taken back to a step; signals end a step, SIGKILL loses nothing.

Covers r3.run.signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r3.errors import RunError
from r3.run import RunDirectory, RunFiles, read_metrics
from r3.run.signals import FINISHING, StopRequested
from tests.run.faults import SmallDisk, python, save

ROOT = Path(__file__).parents[2]
HOLD = """if True:
    import os, sys
    from r3.run import RunDirectory
    held = RunDirectory.create(sys.argv[1], "", seed=1)
    {more}
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def make(path: Path, steps: int = 0) -> RunDirectory:
    """A run that is open, with that many steps and a checkpoint every second one."""
    run = RunDirectory.create(path, "seed: 3\n", seed=3, command=["r3", "train"])
    for step in range(1, steps + 1):
        run.metrics.append(step, {"reward": step})
        run.rollouts.write(step, [{"text": "é", "reward": float("nan")}, {"text": "b"}])
        if step % 2 == 0:
            run.checkpoints.write(step, lambda folder, step=step: save(folder, step))
    return run


def refusal(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(RunError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_new_run_says_what_made_it(tmp_path: Path) -> None:
    with make(tmp_path / "runs" / "first") as run:
        assert RunFiles(run.path).read_config() == "seed: 3\n"
        info = RunFiles(run.path).read_info()
    assert info["format"] == 1
    assert info["seed"] == 3
    assert info["command"] == ["r3", "train"]
    assert set(info["versions"]) == {"r3", "python", "torch", "transformers", "numpy"}
    assert info["created"].endswith("+00:00")
    assert sorted(os.listdir(run.path)) == ["config.yaml", "lock", "metrics.jsonl", "run.json"]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    message = refusal(RunDirectory.create, tmp_path, "", seed=1)
    assert message == (
        f"{tmp_path}: not empty and not a run directory (1 entries, among them 'config.yaml'); choose another run.dir"
    )
    assert "not a run directory (it has no run.json)" in refusal(RunDirectory.open, tmp_path)
    assert "not a run directory" in refusal(RunDirectory.open, tmp_path / "nowhere")
    assert os.listdir(tmp_path) == ["config.yaml"]
    assert "is a file, not a directory" in refusal(RunDirectory.create, tmp_path / "config.yaml", "", seed=1)
    assert "not a run directory" in refusal(RunDirectory.open, tmp_path / "config.yaml")


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    make(path, 2).close()
    message = refusal(RunDirectory.create, path, "", seed=1)
    assert f"resume it with r3 train --resume '{path}' or choose another run.dir" in message
    with RunDirectory.open(path) as run:  # the refusal has released the lock
        assert run.metrics.last_step == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"format": 9, "versions": {"r3": "7.0"}}', "written in format 9 by r3 7.0.*install that version"),
        ('{"format"', "damaged.*restore it"),
        ("[]", "damaged.*restore it"),
    ],
)
def test_a_run_json_that_cannot_be_used_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    make(tmp_path).close()
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=reason):
        RunDirectory.open(tmp_path)


def test_damaged_metrics_are_refused_and_the_lock_released(tmp_path: Path) -> None:
    make(tmp_path, 3).close()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b"oops\n" + lines[2])
    assert "metrics.jsonl, line 2" in refusal(RunDirectory.open, tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    RunDirectory.open(tmp_path).close()


def test_a_run_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    holder = python("-c", HOLD.format(more=""), str(tmp_path))
    pid = int(holder.stdout.readline())
    for action in (RunDirectory.open, lambda path: RunDirectory.create(path, "", seed=1)):
        assert f"{tmp_path}: in use by process {pid} on " in refusal(action, tmp_path)
    holder.kill()
    holder.communicate()
    RunDirectory.open(tmp_path).close()


def test_a_run_whose_lock_was_removed_by_hand_is_still_in_use(tmp_path: Path) -> None:
    with make(tmp_path, 3) as run:
        (tmp_path / "lock").unlink()
        assert "in use by another process, which trains in this directory" in refusal(RunDirectory.open, tmp_path)
        run.rewind(2)  # puts a new metrics file in place of the one that was locked
        (tmp_path / "lock").unlink()
        assert "metrics.jsonl: in use" in refusal(RunDirectory.open, tmp_path)
        run.metrics.append(3, {})
        assert [record["step"] for record in read_metrics(run.metrics_path)] == [1, 2, 3]
    RunDirectory.open(tmp_path).close()


def test_a_run_is_refused_to_its_own_process_too(tmp_path: Path) -> None:
    with make(tmp_path):
        assert f"in use by process {os.getpid()}" in refusal(RunDirectory.open, tmp_path)


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_run(tmp_path: Path) -> None:
    fork = "if os.fork() == 0: print('worker', flush=True); sys.stdin.read(); os._exit(0)"
    holder = python("-c", HOLD.format(more=fork), str(tmp_path), start_new_session=True)
    assert "worker" in holder.stdout.readline() + holder.stdout.readline()  # their lines may run together
    assert "in use by process" in refusal(RunDirectory.open, tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunDirectory.open(tmp_path).close()
    os.killpg(holder.pid, 0)  # the worker is alive all the while
    holder.communicate()


def test_going_back_drops_what_came_later_and_notes_it(tmp_path: Path) -> None:
    make(tmp_path, 7).close()
    with RunDirectory.open(tmp_path) as run:
        assert run.reached is None
        run.rewind(4, command=["r3", "train", "--resume", str(tmp_path)])
        assert [record["step"] for record in read_metrics(run.metrics_path)] == [1, 2, 3, 4]
        assert run.rollouts.steps() == [1, 2, 3, 4]
        assert run.checkpoints.steps() == [2, 4]
        run.rewind(2)
    info = RunFiles(tmp_path).read_info()
    assert info["reached"] == 7
    assert [resume["step"] for resume in info["resumes"]] == [4, 2]


def test_a_resume_under_other_versions_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make(tmp_path, 2)
    run.update_info(versions={**run.info["versions"], "torch": "1.0"})
    run.rewind(2)
    assert "resumed under other versions (torch 1.0 -> " in caplog.text
    assert run.info["resumes"][0]["versions"]["torch"] != "1.0"


def test_rollouts_are_read_back_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    with make(tmp_path, 3) as run:
        assert [row["text"] for row in run.rollouts.read(2)] == ["é", "b"]
        path = tmp_path / "rollouts" / "step-000003.jsonl.gz"
        path.write_bytes(path.read_bytes()[:-20])
        assert "step-000003.jsonl.gz: damaged" in refusal(list, run.rollouts.read(3))
        assert "no rollouts were kept for step 9; kept are [1, 2, 3]" in refusal(list, run.rollouts.read(9))


def test_a_creation_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    for name in ("lock", "config.yaml", ".run.json.tmp-123"):
        (tmp_path / name).write_text("half")
    make(tmp_path, 1).close()
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "lock", "metrics.jsonl", "rollouts", "run.json"]


def test_a_full_disk_keeps_the_old_run_json_and_rollouts(disk: SmallDisk) -> None:
    with make(disk.path / "run", 2) as run, disk.full_at_limit():
        before = run.info_path.read_bytes()
        assert "bytes free" in refusal(run.update_info, notes=["x" * 2 * 128 * 1024])
        noise = [{"text": os.urandom(200_000).hex()}]
        assert "bytes free" in refusal(run.rollouts.write, 3, noise)
        assert run.info_path.read_bytes() == before
        assert run.info == json.loads(before)
        assert run.rollouts.steps() == [1, 2]
        assert not list(run.path.rglob(".*"))


def run_experiment(*arguments: str) -> int:
    process = python("-m", "tests.run.faults", *arguments, cwd=ROOT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return int(output)


def test_a_run_killed_at_each_of_its_file_operations_resumes_exactly(tmp_path: Path) -> None:
    assert run_experiment("everywhere", str(tmp_path), "5") > 60


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_again_and_again_resumes_exactly(tmp_path: Path, seed: int) -> None:
    assert run_experiment("often", str(tmp_path), "24", str(seed)) >= 2


# Ctrl-C and SIGTERM: the step is finished; a second Ctrl-C ends it at once; handlers are put back.


LOOP = """if True:
    import sys
    from r3.run import StopRequested
    try:
        with StopRequested() as stop:
            step = 0
            while not stop:
                step += 1
                print("in step", step, flush=True)
                sys.stdin.readline()
                print("done", step, flush=True)
        print("stopped by", stop.name)
    except KeyboardInterrupt:
        print("interrupted")
"""


def in_first_step() -> subprocess.Popen[str]:
    process = python("-c", LOOP)
    assert process.stdout.readline() == "in step 1\n"
    return process


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal it and wait until it has said so."""
    process.send_signal(number)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline() == f"{number.name}: {FINISHING}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_step_is_finished(number: signal.Signals) -> None:
    process = in_first_step()
    send(process, number)
    assert process.communicate("\n") == (f"done 1\nstopped by {number.name}\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once(first: signal.Signals) -> None:
    process = in_first_step()
    send(process, first)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"  # while the step still waits for its input
    assert process.communicate() == ("", "")


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """As nohup starts it."""
    code = """if True:
        import os, signal
        from r3.run import StopRequested
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequested() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            print(bool(stop))
    """
    assert python("-c", code).communicate() == ("False\n", "")


def test_a_second_sigterm_changes_nothing() -> None:
    process = in_first_step()
    send(process, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.communicate("\n") == ("done 1\nstopped by SIGTERM\n", "")


def test_a_forked_worker_dies_of_a_sigterm_as_before() -> None:
    code = """if True:
        import os, signal
        from r3.run import StopRequested
        with StopRequested() as stop:
            ready, forked = os.pipe()
            worker = os.fork()
            if worker == 0:
                os.write(forked, b"!")
                signal.pause()
                os._exit(0)
            os.read(ready, 1)
            os.kill(worker, signal.SIGTERM)
            _, status = os.waitpid(worker, 0)
            print(os.WTERMSIG(status), bool(stop))
    """
    assert python("-c", code).communicate() == (f"{int(signal.SIGTERM)} False\n", "")


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequested() as stop:
        assert signal.getsignal(signal.SIGINT) == stop._handle
        assert not stop
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with StopRequested() as stop:
            seen.extend([bool(stop), signal.getsignal(signal.SIGTERM) is before])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]


def test_last_words_outlive_a_launchers_signal() -> None:
    """After an error SIGTERM is ignored where asked for; without it the process is gone at once."""
    script = """
        import os, signal, sys
        from r3.run import StopRequested
        try:
            with StopRequested(last_words=sys.argv[1] == "yes"):
                raise RuntimeError
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGTERM)
            print("said")
    """
    code = [sys.executable, "-c", textwrap.dedent(script)]
    heard = subprocess.run([*code, "yes"], capture_output=True, text=True)
    assert (heard.returncode, heard.stdout) == (0, "said\n"), heard.stderr
    cut = subprocess.run([*code, "no"], capture_output=True, text=True)
    assert (cut.returncode, cut.stdout) == (-signal.SIGTERM, "")
