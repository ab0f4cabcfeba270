"""Checkpoints: complete or not there, the newest intact one found, the last N kept, a full disk survived.

Covers r3.run.disk.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r3.errors import RunError
from r3.run.checkpoints import Checkpoint, Checkpoints
from tests.run.faults import LIMIT, SmallDisk


def writer(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(content)
        (folder / "state").write_text(content)

    return write


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Three of them: steps 2, 4 and 6."""
    made = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        made.write(step, writer(f"content {step}"))
    return made


def test_what_was_written_is_the_latest(checkpoints: Checkpoints) -> None:
    latest = checkpoints.latest()
    assert latest == Checkpoint(6, checkpoints.folder / "step-000006")
    assert (latest.path / "policy" / "weights").read_text() == "content 6"
    assert checkpoints.steps() == [2, 4, 6]


def test_none_written_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints").latest() is None


def test_more_than_a_million_steps_stay_in_order(checkpoints: Checkpoints) -> None:
    checkpoints.write(1_000_000, writer("many"))
    checkpoints.write(999_999, writer("fewer"))
    assert checkpoints.steps() == [2, 4, 6, 999_999, 1_000_000]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state").write_text("content"), "state has 7 bytes instead of 9"),
        (lambda path: (path / "state").write_text("content!!"), r"state was changed \(its checksum differs\)"),
        (lambda path: (path / "policy" / "weights").unlink(), "policy/weights cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is not one"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"state": 3}}'), "manifest.json is not one"),
    ],
)
def test_a_damaged_one_is_passed_over_with_its_reason(
    checkpoints: Checkpoints, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(checkpoints.folder / "step-000006")
    assert checkpoints.latest().step == 4
    assert caplog.messages[0].startswith(f"{checkpoints.folder}/step-000006: damaged, not used: ")
    for step in (2, 4):
        (checkpoints.folder / f"step-{step:06d}" / "state").unlink()
    with pytest.raises(RunError, match=f"no checkpoint is intact .*step-000006: {reason}.*restore one") as caught:
        checkpoints.latest()
    assert "\n" not in str(caught.value)


def test_a_flipped_block_of_a_large_file_is_found_at_a_resume(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """More than 64 MiB, in blocks of 16 MiB; what is written again is looked at by size alone."""
    size = 70 * 2**20

    def write(folder: Path) -> None:
        with (folder / "weights").open("wb") as file:
            file.truncate(size)

    checkpoints.write(8, write)
    assert checkpoints.latest().step == 8
    for place in (0, 2**24 - 1, 2**24, size - 1):
        with (checkpoints.folder / "step-000008" / "weights").open("r+b") as file:
            file.seek(place)
            file.write(b"\x01")
            file.flush()
            assert checkpoints.damage(8, thorough=True) == "weights was changed (its checksum differs)"
            file.seek(place)
            file.write(b"\0")
    assert checkpoints.damage(8, thorough=True) is None
    with (checkpoints.folder / "step-000008" / "weights").open("r+b") as file:
        file.write(b"\x01" * 512)
    assert checkpoints.damage(8) is None
    assert checkpoints.latest().step == 6
    assert "weights was changed" in caplog.text
    (checkpoints.folder / "step-000008" / "weights").write_text("short")
    assert checkpoints.damage(8) == f"weights has 5 bytes instead of {size:,}"


def test_large_files_of_earlier_versions_are_checked_by_size(checkpoints: Checkpoints) -> None:
    manifest = checkpoints.folder / "step-000006" / "manifest.json"
    manifest.write_text('{"step": 6, "files": {"state": {"bytes": 4}}}')
    (checkpoints.folder / "step-000006" / "state").write_text("else")
    assert checkpoints.damage(6, thorough=True) is None


def test_a_pipe_in_the_place_of_a_file_is_damage(checkpoints: Checkpoints) -> None:
    path = checkpoints.folder / "step-000006" / "state"
    path.unlink()
    os.mkfifo(path)
    assert checkpoints.damage(6) == "state is no file"
    assert checkpoints.latest().step == 4


def test_only_the_newest_intact_ones_are_kept(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step-000006" / "state").unlink()
    checkpoints.prune(2)
    assert checkpoints.steps() == [2, 4, 6]  # the damaged one is no replacement for an intact one
    checkpoints.prune(1)
    assert checkpoints.steps() == [4, 6]
    with pytest.raises(ValueError, match="at least one"):
        checkpoints.prune(0)


def test_going_back_removes_intact_later_ones(checkpoints: Checkpoints) -> None:
    checkpoints.write(8, writer("later"))
    (checkpoints.folder / "step-000008" / "state").unlink()
    checkpoints.rewind(4)
    assert checkpoints.steps() == [2, 4, 8]
    assert sorted(os.listdir(checkpoints.folder)) == ["step-000002", "step-000004", "step-000008"]


def test_writing_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    checkpoints.write(4, writer("again"))
    assert (checkpoints.folder / "step-000004" / "state").read_text() == "again"
    assert checkpoints.damage(4) is None
    assert sorted(os.listdir(checkpoints.folder)) == ["step-000002", "step-000004", "step-000006"]


@pytest.mark.parametrize("error", [KeyError("bug"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_nothing_and_its_own_error(checkpoints: Checkpoints, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        writer("half")(folder)
        raise error

    with pytest.raises(type(error)):
        checkpoints.write(8, fail)
    assert sorted(os.listdir(checkpoints.folder)) == ["step-000002", "step-000004", "step-000006"]


def test_leftovers_of_killed_writers_are_cleared_up(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.folder
    (folder / ".step-000008.tmp-123").mkdir()
    (folder / ".step-000008.tmp-123" / "half").write_text("x")
    (folder / "step-000006").rename(folder / ".step-000006.replaced-123")  # killed between two renames
    (folder / "step-000002").rename(folder / ".step-000002.pruned-123")
    with caplog.at_level(logging.INFO):
        checkpoints.clean()
    assert sorted(os.listdir(folder)) == ["step-000004", "step-000006"]
    assert checkpoints.latest().step == 6
    assert "put back, as its replacement was never finished" in caplog.text


def test_a_failed_writer_harms_no_file_it_linked_to(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "base").write_text("weights")

    def link_and_fail(folder: Path) -> None:
        (folder / "hard").hardlink_to(tmp_path / "base")
        (folder / "soft").symlink_to(tmp_path / "base")
        raise KeyError("bug")

    with pytest.raises(KeyError):
        checkpoints.write(8, link_and_fail)
    assert (tmp_path / "base").read_text() == "weights"


def too_large(folder: Path) -> None:
    (folder / "small").write_bytes(b"x" * 1000)
    (folder / "large").write_bytes(bytes(2 * LIMIT))


def too_large_for_torch(folder: Path) -> None:
    """torch reports a full disk as a RuntimeError about positions in a file."""
    import torch

    torch.save(torch.zeros(LIMIT), folder / "large")


@pytest.mark.parametrize("write", [too_large, too_large_for_torch])
def test_a_full_disk_costs_only_the_new_checkpoint(disk: SmallDisk, write: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(disk.path / "checkpoints")
    checkpoints.write(2, writer("earlier"))
    with disk.full_at_limit(), pytest.raises(RunError) as caught:
        checkpoints.write(4, write)
    message = str(caught.value)
    assert message.startswith(f"{checkpoints.folder}/step-000004: cannot write the checkpoint (failed after ")
    assert "bytes free); nothing half-written was kept: free some space, then go on" in message
    assert "\n" not in message
    assert os.listdir(checkpoints.folder) == ["step-000002"]
    assert checkpoints.latest().step == 2
    checkpoints.write(4, writer("small enough"))
    assert checkpoints.latest().step == 4


def four_megabytes(folder: Path, save: Callable[[Any, Path], None]) -> None:
    import torch

    save({"weight": torch.zeros(2**20)}, folder / "weights")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_disk_that_still_takes_small_files_is_full_all_the_same(kind: str, tmp_path: Path) -> None:
    """A write of 4 MiB is refused where one of 1 MiB would be taken."""
    import safetensors.torch
    import torch

    save = torch.save if kind == "torch" else safetensors.torch.save_file
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.write(2, writer("earlier"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, hard))
    try:
        with pytest.raises(RunError) as caught:
            checkpoints.write(4, lambda folder: four_megabytes(folder, save))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write the checkpoint (failed after" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(checkpoints.folder) == ["step-000002"]
    assert checkpoints.latest().step == 2
