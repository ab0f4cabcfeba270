"""What stands around a run: streams that are closed or poor, ranks that are stopped, numbers that are none."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from r3.cli import main
from r3.policy import world
from tests.train.tiny import ROOT, command, overrides, read_metrics


@pytest.mark.parametrize("stdout", ["closed", "no reader", "ascii", "full"])
def test_a_finished_run_is_finished_whatever_reads_it(stdout: str, tmp_path: Path) -> None:
    arguments = command("train", *overrides(tmp_path, train__steps=1))
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    reader, writer = os.pipe()
    if stdout == "closed":
        arguments = ["bash", "-c", 'exec "$@" >&-', "r3", *arguments]
    if stdout == "no reader":
        os.close(reader)
    if stdout == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(arguments, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(writer)
    if stdout != "no reader":
        os.close(reader)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1


def test_a_run_that_diverged_names_a_command_that_resume_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from r3.policy.optimiser import Optimiser

    with monkeypatch.context() as patch:
        patch.setattr(Optimiser, "_clip", lambda _: float("nan"))
        settings = overrides(tmp_path, train__max_bad_updates=1, train__steps=4)
        assert main(["train", "--quiet", *settings]) == 3
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith("r3: 1 updates in a row had NaN or infinite gradients: lower train.learning_rate")
    advice = line.split("r3 train ")[1].split()
    assert advice == ["--resume", str(tmp_path / "run"), "train.learning_rate=0.0005"]
    assert main(["train", "--quiet", *advice]) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


def test_waiting_for_a_stopped_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "WORD", 0.0)
    said: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: said.put(record.getMessage())  # type: ignore[method-assign]
    world.log.addHandler(handler)
    try:
        with world._connected(0):
            assert "still waiting for another process of this job" in said.get(timeout=60)
    finally:
        world.log.removeHandler(handler)


@pytest.mark.skipif(sys.platform != "linux", reason="a process learns of its parent's end by Linux' own means")
def test_the_cells_of_a_killed_comparison_end_with_it() -> None:
    code = """if True:
        import signal, sys
        from r3.compare.runner import _launch
        _launch([sys.executable, "-c", "import signal; print('cell', flush=True); signal.pause()"], sys.stdout)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        assert comparison.stdout.readline() == "cell\n"
        comparison.kill()
        assert comparison.stdout.read() == ""  # the end of the pipe: nobody holds it any more
