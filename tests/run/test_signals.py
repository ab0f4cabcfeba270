"""Ctrl-C and SIGTERM: the step is finished; a second Ctrl-C ends it at once; handlers are put back."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from r3.run.signals import FINISHING, StopRequested
from tests.run.faults import python

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
