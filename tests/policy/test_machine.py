"""What a container leaves of memory and processors, from the files that say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from r3.policy import machine
from r3.policy.machine import allowed_processors, free_memory, set_threads


def control_group(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 3 * 2**20),
        ({"memory.max": "max", "memory.current": "5"}, 3 * 2**20),
        ({"memory.max": "2097152", "memory.current": "1048576"}, 2**20),
        ({"memory.max": "5", "memory.current": "7"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "9"}, 3 * 2**20),
        ({"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "40"}, 60),
    ],
)
def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path, files: dict[str, str], free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9999 kB\nMemAvailable:   3072 kB\n")
    control_group(tmp_path, files)
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "400000"}, None),
    ],
)
def test_processors_are_those_of_the_quota(tmp_path: Path, files: dict[str, str], processors: int | None) -> None:
    control_group(tmp_path, files)
    assert allowed_processors(tmp_path) == processors


@pytest.mark.parametrize(
    ("wanted", "cores", "quota", "set_to"),
    [(None, 64, None, []), (None, 64, 2, [2]), (None, 2, 64, []), (5, 64, 2, [5])],
)
def test_threads_are_as_many_as_may_run(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, cores: int, quota: int | None, set_to: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(machine, "allowed_processors", lambda: quota)
    set_threads(wanted)
    assert chosen == set_to
