"""TensorBoard curves that do not double on resume, and services that are not installed.

The services themselves: `tests/train/test_record.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from r3.errors import RunError
from r3.run import RunDirectory, TensorBoardSink, open_sinks
from tests.run.faults import SmallDisk, python


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
