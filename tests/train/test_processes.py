"""`r3 train` in several processes, started as users start it: the same run as in one, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, overrides, read_metrics, run_r3

# Three queries and their reflections for two processes: shares are ragged in requests, samples and micro-batches.
RAGGED = {"train__queries_per_step": 3, "train__tokens_per_microbatch": 60, "train__epochs": 2}


def torchrun(processes: int, *arguments: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", "r3", *map(str, arguments)]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The job in a process group of its own, none of which outlives the test."""
    job = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        assert job.stdout is not None
        job.stdout.close()


def finish(command: list[str]) -> str:
    with started(command) as job:
        output, _ = job.communicate()
        assert job.returncode == 0, output
    return output


def assert_same_run(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            expected = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            assert mine[key] == expected, (mine["step"], key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_r3("train", "--quiet", *overrides(folder, **RAGGED))
    return read_metrics(folder / "run")


def test_two_processes_make_the_run_of_one(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    finish(torchrun(2, "train", "--quiet", *overrides(tmp_path, **RAGGED)))
    together = read_metrics(tmp_path / "run")
    assert_same_run(together, alone)
    assert together[1]["update/grad_norm"] == pytest.approx(alone[1]["update/grad_norm"], rel=1e-5)
    assert max(line.get("update/microbatches", 0) for line in together) > 2
    assert sum(line.get("replay/samples") or 0 for line in together) > 0


def worker(job: subprocess.Popen[str], rank: int) -> int:
    """The process of that rank, by its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0") if parent == job.pid else []
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
        if f"RANK={rank}".encode() in variables:
            return int(path.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_killed_process_ends_the_job_which_goes_on_with_any_number(
    tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    settings = overrides(tmp_path, **RAGGED, run__checkpoint_every=1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started(torchrun(2, "train", "--quiet", *settings)) as job:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
            assert job.poll() is None, job.communicate()[0]
        os.kill(worker(job, rank=1), signal.SIGKILL)
        output, _ = job.communicate()
        assert job.returncode != 0
    assert "another process of this job is gone" in output
    assert "--resume" in output
    run_r3("train", "--quiet", "--resume", tmp_path / "run")
    assert_same_run(read_metrics(tmp_path / "run"), alone)


def test_what_is_wrong_is_said_once_and_ends_every_process(tmp_path: Path) -> None:
    command = torchrun(2, "train", "--quiet", *overrides(tmp_path, task__path=tmp_path / "missing.jsonl"))
    with started(command) as job:
        output, _ = job.communicate()
        assert job.returncode != 0
    assert output.count("r3: ") == 1, output
    assert "missing.jsonl" in output
