"""`r3 train` in several processes, started as users start it: the same run as in one, whatever dies on the way.

Run as a program, this file is `r3` whose sharded copy has compiled layers, as on a card.

Covers r3.policy.world.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from r3.cli import main
from r3.errors import RunError
from r3.policy.layers import CompiledLayers
from r3.policy.world import ShardedPolicy, World
from tests.train.tiny import ROOT, overrides, read_metrics, save_model

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")

# Three queries and their reflections for two processes: shares are ragged in requests, samples and micro-batches.
RAGGED = {"train__queries_per_step": 3, "train__tokens_per_microbatch": 60, "train__epochs": 2}


def torchrun(processes: int, *arguments: str | Path, module: str = "r3") -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", module, *map(str, arguments)]


def nodes(count: int, *arguments: str | Path) -> list[list[str]]:
    """The launchers of so many machines, each with one process; here they meet on the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = [f"--nnodes={count}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting]
    return [[*launcher, f"--node-rank={rank}", "-m", "r3", *map(str, arguments)] for rank in range(count)]


def accelerate(processes: int, *arguments: str | Path) -> list[str]:
    """As on cards, since its launcher for CPUs starts one process only; without a card they run on the CPU as well."""
    options = f"--multi_gpu --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
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
    assert main(["train", "--quiet", *overrides(folder, **RAGGED)]) == 0
    return read_metrics(folder / "run")


def test_two_processes_make_the_run_of_one(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    finish(torchrun(2, "train", "--quiet", *overrides(tmp_path, **RAGGED)))
    together = read_metrics(tmp_path / "run")
    assert_same_run(together, alone)
    assert together[1]["update/grad_norm"] == pytest.approx(alone[1]["update/grad_norm"], rel=1e-5)
    assert max(line.get("update/microbatches", 0) for line in together) > 2
    assert sum(line.get("replay/samples") or 0 for line in together) > 0


def test_a_sharded_run_is_the_same_run_and_goes_on_whole_or_sharded(
    tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    """Masters, gradients and moments split over two processes: the run of one, whoever wrote its checkpoint."""
    sharded = overrides(tmp_path, **RAGGED, train__shard="true", run__checkpoint_every=2, run__keep_checkpoints=9)
    finish(accelerate(2, "train", "--quiet", *sharded, "train.steps=4"))
    assert_same_run(read_metrics(tmp_path / "run"), alone[:5])
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run"), "train.shard=false", "train.steps=5"]) == 0
    finish(torchrun(2, "train", "--quiet", "--resume", str(tmp_path / "run"), "train.shard=true", "train.steps=null"))
    assert_same_run(read_metrics(tmp_path / "run"), alone)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="compiling needs a C++ compiler")
def test_compiled_layers_of_a_sharded_policy(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    settings = overrides(tmp_path, **RAGGED, train__shard="true", train__steps=1)
    output = finish(torchrun(2, "train", "--quiet", *settings, module="tests.train.test_processes"))
    counts = [int(count) for count in re.findall(r"compiled graphs: (\d+)", output)]
    assert len(counts) == 2, output
    assert min(counts) > 0
    assert_same_run(read_metrics(tmp_path / "run")[:1], alone[:1])
    ours, expected = read_metrics(tmp_path / "run")[1], alone[1]
    for key in ("update/grad_norm", "update/loss", "update/microbatches", "tokens/trained"):
        assert ours[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
def test_sharded_masters_of_a_rounded_policy(tmp_path: Path) -> None:
    """In bfloat16 sums in another order round differently, so only the first update is compared; then all is resumed.

    The model's head is its embedding, and layers are run again in the backward pass: both are FSDP's to get right.
    """
    save_model(tmp_path / "model", tied=True)
    own = {**RAGGED, "model__dtype": "bfloat16", "model__gradient_checkpointing": "true", "train__steps": 1}
    assert main(["train", "--quiet", *overrides(tmp_path, **own, run__dir=tmp_path / "whole")]) == 0
    finish(torchrun(2, "train", "--quiet", *overrides(tmp_path, **own, train__shard="true")))
    states = [torch.load(next(tmp_path.glob(f"{run}/checkpoints/*/trainer.pt"))) for run in ("whole", "run")]
    whole, found = (state["optimiser"] for state in states)
    assert found["adamw"]["param_groups"] == whole["adamw"]["param_groups"]
    for place, moments in whole["adamw"]["state"].items():
        for name, value in moments.items():
            torch.testing.assert_close(found["adamw"]["state"][place][name], value, rtol=0.05, atol=1e-4)
    for ours, expected in zip(found["masters"], whole["masters"], strict=True):
        assert ours.dtype == torch.float32
        # AdamW's first step is the learning rate, 1e-3, in the direction of each gradient: few are near zero.
        assert float(((ours - expected).abs() < 1e-4).float().mean()) > 0.98
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run"), "train.shard=false", "train.steps=2"]) == 0
    finish(torchrun(2, "train", "--quiet", "--resume", str(tmp_path / "whole"), "train.shard=true", "train.steps=2"))
    for run in ("whole", "run"):
        assert read_metrics(tmp_path / run)[-1]["step"] == 2


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


def state_of(process: int) -> str:
    """R for running, S for waiting, T for stopped."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def until_all_wait(processes: Sequence[int]) -> None:
    """Until none of them has anything left to do, seen often enough not to be chance."""
    idle = 0
    while idle < 200:
        idle = idle + 1 if all(state_of(process) == "S" for process in processes) else 0
        os.sched_yield()


def wait_for_lines(job: subprocess.Popen[str], metrics: Path, count: int) -> None:
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert job.poll() is None, job.communicate()[0]
        os.sched_yield()


@pytest.mark.slow
@linux
def test_four_processes_one_slow_and_one_killed_then_one_then_two_machines(
    tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    """Three queries for four: a rank may have nothing to answer, and some have no micro-batch. All of it is one run."""
    settings = overrides(tmp_path, **RAGGED, train__shard="true", run__checkpoint_every=1)
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    with started(torchrun(4, "train", "--quiet", *settings)) as job:
        wait_for_lines(job, metrics, 3)  # the first step has its checkpoint
        ranks = [worker(job, rank) for rank in range(4)]
        os.kill(ranks[3], signal.SIGSTOP)
        for slow, next_one in ((3, 1), (1, 3), (3, 1)):  # from here on one is always stopped: the run cannot end
            until_all_wait([ranks[rank] for rank in range(4) if rank != slow])
            os.kill(ranks[next_one], signal.SIGSTOP)
            os.kill(ranks[slow], signal.SIGCONT)
        until_all_wait([ranks[rank] for rank in (0, 2, 3)])
        os.kill(ranks[2], signal.SIGKILL)
        os.kill(ranks[1], signal.SIGCONT)
        output, _ = job.communicate()
        assert job.returncode != 0
    assert "another process of this job is gone" in output or "stopped after step" in output, output
    reached = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert 1 <= reached < len(alone) - 2, output
    assert main(["train", "--quiet", "--resume", str(run), "train.shard=false", f"train.steps={reached + 1}"]) == 0
    first, second = nodes(2, "train", "--quiet", "--resume", run, "train.shard=true", "train.steps=null")
    with started(second) as other:
        finish(first)
        output, _ = other.communicate()
        assert other.returncode == 0, output
    assert_same_run(read_metrics(run), alone)


@linux
def test_a_killed_process_ends_the_job_which_goes_on_with_any_number(
    tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    settings = overrides(tmp_path, **RAGGED, run__checkpoint_every=1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started(torchrun(2, "train", "--quiet", *settings)) as job:
        wait_for_lines(job, metrics, 4)
        os.kill(worker(job, rank=1), signal.SIGKILL)
        output, _ = job.communicate()
        assert job.returncode != 0
    # Rank 0 finds the other gone, or the launcher stops it first, between two steps.
    assert "another process of this job is gone" in output or "stopped after step" in output, output
    assert "--resume" in output
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run")]) == 0
    assert_same_run(read_metrics(tmp_path / "run"), alone)


DIES_AT_RESUME = """
import os, signal, sys
from r3.cli import main
from r3.policy.world import ShardedOptimiser
if os.environ["RANK"] == "1":
    ShardedOptimiser.load = lambda self, state: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_process_that_dies_while_sharded_moments_are_loaded(tmp_path: Path) -> None:
    """FSDP's own exchanges break; what is said is what any other exchange of the job says."""
    settings = overrides(tmp_path, **RAGGED, train__shard="true", train__steps=1)
    assert main(["train", "--quiet", *settings]) == 0
    (tmp_path / "dies.py").write_text(DIES_AT_RESUME)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    resume = ["train", "--quiet", "--resume", str(tmp_path / "run"), "train.steps=2"]
    with started([*launcher, str(tmp_path / "dies.py"), *resume]) as job:
        output, _ = job.communicate()
        assert job.returncode != 0
    assert "another process of this job is gone" in output, output
    assert "--resume" in output


def test_only_a_broken_connection_is_said_to_be_one() -> None:
    with pytest.raises(RunError, match="another process of this job is gone"), World(1, 2).together():
        raise RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(torch.OutOfMemoryError), World(1, 2).together():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_is_wrong_is_said_once_and_ends_every_process(tmp_path: Path) -> None:
    command = torchrun(2, "train", "--quiet", *overrides(tmp_path, task__path=tmp_path / "missing.jsonl"))
    with started(command) as job:
        output, _ = job.communicate()
        assert job.returncode != 0
    assert output.count("r3: no file") == 1, output
    assert output.count("has no effect") == 1, output  # a setting of the tiny run that is off
    assert "missing.jsonl" in output


def run_compiled() -> int:
    import torch._dynamo

    whole = ShardedPolicy.__init__

    def compiled(self: ShardedPolicy, *given: Any) -> None:
        whole(self, *given)
        self._compiled = CompiledLayers(self.base, "update")

    ShardedPolicy.__init__ = compiled  # type: ignore[method-assign]
    code = main()
    print(f"compiled graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")
    return code


if __name__ == "__main__":
    sys.exit(run_compiled())
