"""Progress on screen: plain lines in a pipe, a live display in a terminal, and no harm when either goes away.

Covers r3.run.live.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
from collections.abc import Callable

import pytest

from r3.run import Progress
from tests.run.faults import python

SHOWN = {
    "reward": "reward/mean",
    "accuracy": "accuracy",
    "solve none": "solve/none",
    "solve all": "solve/all",
    "entropy": "entropy",
    "tokens/s": "speed",
}


def metrics(step: int) -> dict[str, float]:
    return {"reward/mean": step / 8, "accuracy": step / 10, "solve/none": 1 - step / 10, "solve/all": 0.25} | {
        "entropy": float("nan"),
        "speed": 12345.6,
    }


def in_terminal(draw: Callable[[Progress], None], encoding: str = "utf-8") -> str:
    """What a terminal receives of a display of 8 steps."""
    master, slave = os.openpty()
    received = []

    def receive() -> None:
        try:
            while data := os.read(master, 4096):
                received.append(data)
        except OSError:  # EIO: the other end is closed
            pass

    reader = threading.Thread(target=receive)
    reader.start()
    with os.fdopen(slave, "w", encoding=encoding) as stream, Progress(8, SHOWN, stream=stream) as progress:
        draw(progress)
    reader.join()
    os.close(master)
    return b"".join(received).decode(encoding)


def text_of(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def three_steps(progress: Progress) -> None:
    for step in (1, 2, 3):
        progress.phase("rollout")
        progress.update(step, metrics(step))
    progress.say("checkpoint written – step 3")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    with Progress(8, SHOWN, stream=stream, clock=itertools.count(0, 30).__next__) as progress:
        three_steps(progress)
    assert stream.getvalue().splitlines() == [
        "step 1/8  eta 3m 30s  reward 0.125  accuracy 0.100  solve none 0.900  solve all 0.250  entropy -  "
        "tokens/s 12,346",
        "step 2/8  eta 3m 00s  reward 0.250  accuracy 0.200  solve none 0.800  solve all 0.250  entropy -  "
        "tokens/s 12,346",
        "step 3/8  eta 2m 30s  reward 0.375  accuracy 0.300  solve none 0.700  solve all 0.250  entropy -  "
        "tokens/s 12,346",
        "checkpoint written – step 3",
    ]


def test_a_stream_that_is_not_unicode_gets_what_it_can_hold() -> None:
    raw = io.BytesIO()
    with Progress(8, {"β": "b"}, stream=io.TextIOWrapper(raw, encoding="ascii")) as progress:
        progress.update(1, {"b": 1.0})
        assert raw.getvalue().endswith(b"? 1.000\n")


def test_a_terminal_shows_everything_live() -> None:
    output = in_terminal(three_steps)
    last = text_of(output).rsplit("━\r\n", 1)[-1]
    for part in (
        "step 3/8",
        "eta ",
        "reward 0.375",
        "accuracy 0.300",
        "solve all 0.250",
        "entropy –",
        "tokens/s 12,346",
    ):
        assert part in last
    assert "accuracy   ▁▅█ 0.300" in last
    assert "solve none █▅▁ 0.700" in last
    assert "rollout" in text_of(output)
    assert "checkpoint written – step 3" in output
    assert "\x1b[36m" in output
    assert output.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    output = in_terminal(three_steps)
    assert "step 3/8" in text_of(output)
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m", output)


def test_a_terminal_that_is_not_unicode_gets_ascii() -> None:
    output = text_of(in_terminal(three_steps, encoding="ascii"))
    assert "accuracy   _=# 0.300" in output
    assert "checkpoint written ? step 3" in output


@pytest.mark.parametrize("columns", [10, 24, 40])
def test_a_narrow_terminal_is_not_overrun(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    output = in_terminal(lambda progress: [progress.update(step, metrics(step)) for step in range(1, 9)] and None)
    lines = text_of(output).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= columns
    assert any("step" in line for line in lines)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    output = in_terminal(three_steps)
    assert "\x1b" not in output
    assert output.count("step") == 4


def test_a_resumed_run_shows_the_trend_so_far() -> None:
    past = [metrics(step) for step in range(1, 200)]
    progress = Progress(200, SHOWN, past=past, stream=io.StringIO())
    assert list(progress.trends["accuracy"])[-1] == 19.9
    assert len(progress.trends["solve none"]) == 60
    assert progress.eta is None


def test_a_closed_pipe_ends_the_display_alone(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, Progress(8, SHOWN, stream=stream) as progress:
        progress.update(1, metrics(1))
        os.close(reading)
        progress.update(2, metrics(2))
        progress.update(3, metrics(3))
    assert [message.split(" (")[0] for message in caplog.messages] == [
        "the progress display is off, as its output is gone"
    ]


def test_a_lost_terminal_ends_the_display_alone(caplog: pytest.LogCaptureFixture) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, Progress(8, SHOWN, stream=stream) as progress:
        os.close(master)
        progress.update(1, metrics(1))
        progress.update(2, metrics(2))
    assert len(caplog.messages) == 1


def test_a_closed_stream_ends_the_display_alone(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with Progress(8, SHOWN, stream=stream) as progress:
        stream.close()
        progress.update(1, metrics(1))
    assert len(caplog.messages) == 1


def test_a_process_whose_reader_leaves_ends_well() -> None:
    code = """if True:
        import itertools, sys
        from r3.run import Progress
        with Progress(8, {"x": "x"}) as progress:
            progress.update(1, {"x": 1})
            sys.stdin.read()
            progress.update(2, {"x": 2})
        print("still here", file=sys.stderr)
    """
    process = python("-c", code)
    assert process.stdout.readline().startswith("step 1/8")
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read().splitlines()[-1] == "still here"
    assert process.wait() == 0
    process.stderr.close()


def test_a_process_without_standard_output_ends_well() -> None:
    code = "from r3.run import Progress\nwith Progress(8, {'x': 'x'}) as progress: progress.update(1, {'x': 1})"
    process = python("-c", f"import sys; sys.stdout = None\n{code}")
    assert process.communicate() == ("", "")
    assert process.returncode == 0
