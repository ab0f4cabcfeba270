"""metrics.jsonl: strict, stable lines, whole or not there, taken back byte for byte; TensorBoard and other services.

Covers r3.run.disk, r3.run.metrics.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from r3.errors import RunError
from r3.run import RunDirectory, TensorBoardSink, open_sinks
from r3.run.disk import decode_line, encode_line
from r3.run.metrics import MetricsLog, read_metrics
from tests.run.faults import SmallDisk, python


def write(path: Path, steps: range) -> MetricsLog:
    log = MetricsLog(path, durable=False)
    for step in steps:
        log.append(step, {"reward": step / 7, "accuracy": 0.5})
    return log


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "null"),
        (None, "null"),
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (True, "true"),
        ({"b": 1, "a": [np.float64("nan"), "é"]}, '{"a":[null,"\\u00e9"],"b":1}'),
    ],
)
def test_values_are_written_as_strict_json(tmp_path: Path, value: Any, written: str) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"x": value})
    assert log.path.read_text() == f'{{"step":1,"x":{written}}}\n'


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    assert encode_line({"b": 1, "step": 2, "a": 3}, "step") == encode_line({"a": 3, "b": 1, "step": 2}, "step")


def test_a_value_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"'samples.best' is a set"):
        encode_line({"samples": {"best": {1}}})


numbers = st.floats() | st.integers(-(2**60), 2**60) | st.booleans() | st.text().filter(lambda text: "Inf" not in text)


@given(st.dictionaries(st.text(), numbers | st.lists(numbers), max_size=5))
def test_what_is_written_is_read_back(record: dict[str, Any]) -> None:
    line = encode_line(record)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line.count(b"\n") == 1
    assert repr(decode_line(line)) == repr(dict(sorted(record.items())))


def test_steps_only_go_forward(tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", range(1, 4))
    with pytest.raises(ValueError, match="already ends at step 3; step 3 cannot follow"):
        log.append(3, {})
    with pytest.raises(ValueError, match="the metrics of step 4 carry step 5"):
        log.append(4, {"step": 5})
    log.append(4, {"step": 4})
    assert steps_of(log.path) == [1, 2, 3, 4]


@pytest.mark.parametrize("back_to", [0, 1, 4, 9])
def test_going_back_keeps_a_prefix_and_goes_on_the_same(tmp_path: Path, back_to: int) -> None:
    log = write(tmp_path / "metrics.jsonl", range(1, 10))
    whole = log.path.read_bytes()
    assert log.rewind(back_to) == (back_to or None)
    assert steps_of(log.path) == list(range(1, back_to + 1))
    log.close()
    write(log.path, range(back_to + 1, 10))
    assert log.path.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_going_back_to_a_step_the_file_never_reached_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write(tmp_path / "metrics.jsonl", range(1, 4)).rewind(8) == 3
    assert "ends at step 3, before step 8: the lines between are missing" in caplog.text


def test_a_file_cut_anywhere_keeps_every_whole_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = write(tmp_path / "whole", range(1, 5)).path.read_bytes()
    for size in range(len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:size])
        caplog.clear()
        log = MetricsLog(path, durable=False)
        lines = whole[: size + 1].count(b"\n")  # a line that lacks nothing but its newline is whole
        assert path.read_bytes() == whole[:size]  # looking changes nothing: the first write repairs
        assert log.last_step == (lines or None)
        log.append(9, {})
        assert steps_of(path) == [*range(1, lines + 1), 9]
        assert len(caplog.records) == (whole[:size][-1:] not in (b"", b"\n"))
        log.close()


def test_zeros_at_the_end_after_a_power_cut_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "metrics.jsonl", range(1, 4)).path
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(500))
    log = MetricsLog(path)
    assert log.last_step == 3
    log.rewind(3)
    assert path.read_bytes() == whole
    assert "dropped the last line, cut off after 500 bytes" in caplog.text


@pytest.mark.parametrize(
    "bad", [b'{"step":2,"re\n', b"[]\n", b'{"reward":1}\n', b'{"step":1}\n', b'{"step":2,"x":NaN}\n', b"\xff\xfe\n"]
)
def test_a_bad_line_in_the_middle_is_named_and_nothing_changed(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + bad + b'{"step":3}\n{"st')
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: damaged .*; nothing was changed: restore") as caught:
        MetricsLog(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read the metrics"):
        list(read_metrics(tmp_path / "metrics.jsonl"))


def test_half_a_line_is_not_yet_one_for_a_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", range(1, 3)).path
    with path.open("ab") as file:
        file.write(b'{"step":3,')
        file.flush()
        assert steps_of(path) == [1, 2]
        file.write(b'"x":1}\n')
    assert steps_of(path) == [1, 2, 3]


def test_a_reader_next_to_a_writer_sees_whole_lines_in_order(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from r3.run import MetricsLog
        log = MetricsLog(Path(sys.argv[1]), durable=False)
        print("ready", flush=True)
        for step in range(1, 501):
            log.append(step, {"text": "x" * step})
    """
    path = tmp_path / "metrics.jsonl"
    writer = python("-c", code, str(path))
    assert writer.stdout.readline() == "ready\n"
    seen = [0]
    while seen[-1] < 500:
        seen = [0, *steps_of(path)]
        assert seen == list(range(len(seen)))
    assert writer.communicate() == ("", "")


def test_a_full_disk_leaves_no_half_line_and_says_so(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(disk.path / "metrics.jsonl")
    with disk.full_at_limit():
        for step in range(1, 5):
            log.append(step, {"text": "x" * 30_000})
        with pytest.raises(RunError) as caught:
            log.append(5, {"text": "x" * 30_000})
        message = str(caught.value)
        assert message.startswith(f"{log.path}: cannot write 30,0")
        assert "bytes free); nothing half-written was kept: free some space, then go on" in message
        assert "\n" not in message
        assert log.path.read_bytes().endswith(b"\n")
        assert steps_of(log.path) == [1, 2, 3, 4]
        log.append(5, {"short": 1})  # the log itself is still good
    log.close()
    with caplog.at_level(logging.WARNING):
        assert MetricsLog(log.path).last_step == 5
    assert not caplog.records


# TensorBoard curves that do not double on resume, and services that are not installed. The services themselves:
# `tests/train/test_record.py`.


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def log(sink: Any, steps: range, scale: float) -> None:
    for step in steps:
        sink.log(step, {"step": step, "reward": {"mean": step * scale}, "note": "text", "solved": True})


def test_tensorboard_shows_numbers_under_their_names(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    log(sink, range(1, 4), 0.5)
    sink.close()
    assert curve(tmp_path, "reward/mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert curve(tmp_path, "solved") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    with pytest.raises(KeyError):
        curve(tmp_path, "step")


@pytest.mark.parametrize("cut", [0, 5])
def test_a_resumed_curve_does_not_double(tmp_path: Path, cut: int) -> None:
    """Also when the first file's last record was cut off by a kill."""
    log(TensorBoardSink(tmp_path), range(1, 8), 1.0)
    (first,) = tmp_path.iterdir()
    first.write_bytes(first.read_bytes()[: first.stat().st_size - cut])
    log(TensorBoardSink(tmp_path, resumed_at=4), range(5, 7), 2.0)
    log(TensorBoardSink(tmp_path, resumed_at=5), range(6, 9), 4.0)
    steps, values = zip(*curve(tmp_path, "reward/mean"), strict=True)
    assert steps == (1, 2, 3, 4, 5, 6, 7, 8)
    assert values == (1, 2, 3, 4, 10, 24, 28, 32)


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from r3.run import TensorBoardSink
        assert not {"torch", "rich", "tensorboard", "numpy"} & set(sys.modules), "imported too early"
        TensorBoardSink(Path(sys.argv[1])).log(1, {"x": 1.0})
        assert "torch" not in sys.modules
    """
    assert python("-c", code, str(tmp_path)).communicate() == ("", "")


def test_a_full_disk_leaves_whole_events(disk: SmallDisk) -> None:
    folder = disk.path / "tensorboard"
    sink = TensorBoardSink(folder)
    metrics = {f"metric-{number:04d}": 1.0 for number in range(1800)}
    with disk.full_at_limit():
        for step in (1, 2, 3):
            sink.log(step, metrics)
        with pytest.raises(RunError, match="bytes free"):
            sink.log(4, metrics)
        sink.log(5, {"metric-0000": 5.0})
    sink.close()
    assert curve(folder, "metric-0000") == [(1, 1), (2, 1), (3, 1), (5, 5)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with RunDirectory.create(tmp_path, "", seed=1) as run:
        with pytest.raises(RunError, match=rf"needs the package {name}: pip install 'r3-rl\[{name}\]'"):
            open_sinks(["tensorboard", name], run)
        with pytest.raises(RunError, match="no metrics sink is called 'tensorbored'; choose among tensorboard, wandb"):
            open_sinks(["tensorbored"], run)
