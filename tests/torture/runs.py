"""A run that is damaged, killed or short of disk, at random; resumed, it is exact or refused with one line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.errors import RunError
from r3.run.checkpoints import Checkpoints
from tests.torture.inputs import damaged, fault_of
from tests.train.tiny import ROOT, command, overrides, read_metrics

STEPS, LONGER = 4, 6
SETTINGS = {"train__epochs": 40, "run__checkpoint_every": 2, "evaluate__every": 2}


def make_runs(folder: Path) -> None:
    """A run of four steps, `run`, and the same of six, `whole`, that a resumed one must equal."""
    for steps, name in ((LONGER, "whole"), (STEPS, "run")):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["train", "--quiet", *overrides(folder, **SETTINGS, train__steps=steps)]) == 0
        if name != "run":
            (folder / "run").rename(folder / name)


def damage_fault(folder: Path, chance: random.Random) -> str | None:
    """A copy of the run with one of its files or folders gone, cut, changed or older: resumed exactly, or refused."""
    run = folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "run", run)
    told = _damage(run, chance)
    before = _snapshot(run)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        wrong = fault_of(["train", "--quiet", "--resume", str(run), f"train.steps={LONGER}"], codes=(0, 1, 2))
    if wrong is not None:
        return f"{told}: {wrong}"
    if _finished(run):
        return None if _equal(run, folder / "whole") else f"{told}: resumed to another run without a word"
    return None if _snapshot(run) == before else f"{told}: refused, but something was changed"


def _damage(run: Path, chance: random.Random) -> str:
    files = sorted(
        path for path in run.rglob("*") if path.is_file() and path.name not in ("lock", "buffer.sqlite.lock")
    )
    path = chance.choice(files)
    if chance.random() < 0.2:
        path = path.parent if path.parent != run else path
    kind = chance.choice(["remove", "bytes", "bytes", "pipe"])
    if kind == "bytes" and path.is_file():
        path.write_bytes(damaged(path.read_bytes(), chance))
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
    return f"{kind} {path.relative_to(run)}"


def _snapshot(run: Path) -> dict[str, str]:
    notes = ("lock", "buffer.sqlite.lock", "buffer.sqlite-shm", "buffer.sqlite-wal")
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in notes
    }


def _finished(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.is_file() and f'{{"step":{LONGER},'.encode() in path.read_bytes()


def _equal(run: Path, whole: Path) -> bool:
    """The same weights, the same buffer; and the same metrics, of the lines that damage left."""
    weights = f"checkpoints/step-{LONGER:06d}/policy/model.safetensors"
    contents = []
    for path in (run, whole):
        with SampleBuffer.open_reader(path / "buffer.sqlite") as buffer:
            contents.append(buffer.contents())
    expected = {line["step"]: line for line in read_metrics(whole)}
    lines = all(_numbers(line) == _numbers(expected[line["step"]]) for line in read_metrics(run)[-2:])
    return (run / weights).read_bytes() == (whole / weights).read_bytes() and contents[0] == contents[1] and lines


def _numbers(line: dict[str, object]) -> str:
    return json.dumps({key: value for key, value in line.items() if key != "tokens/total"}, sort_keys=True)


def kill_fault(folder: Path, chance: random.Random) -> str | None:
    """`r3 train` in a process of its own, killed or signalled once it has written so many bytes of metrics."""
    run = folder / "killed"
    shutil.rmtree(run, ignore_errors=True)
    settings = overrides(folder, **SETTINGS, train__steps=LONGER, run__dir=run)
    number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    lines, spins = chance.randint(0, LONGER), chance.randint(0, 20_000)
    process = subprocess.Popen(
        command("train", "--quiet", *settings), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not _has_lines(run / "metrics.jsonl", lines):
        os.sched_yield()
    for _ in range(spins):  # somewhere within the step
        os.sched_yield()
    process.send_signal(number)
    _, errors = process.communicate()
    if "Traceback" in errors:
        return f"{number.name} after {lines} lines: {errors[-300:]}"
    if process.returncode not in (0, -signal.SIGKILL, 130, 143, 129, -number):
        return f"{number.name}: exit code {process.returncode}: {errors[-300:]}"
    wrong = fault_of(["train", "--quiet", "--resume", str(run)], codes=(0,)) if (run / "run.json").exists() else None
    if wrong is not None:
        return f"{number.name} after {lines} lines: {wrong}"
    return None if not (run / "run.json").exists() or _equal(run, folder / "whole") else f"{number.name}: not the same"


def _has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


def full_disk_fault(folder: Path, chance: random.Random) -> str | None:
    """A file limit anywhere between nothing and all that a resumed run writes: refused or told, and then resumed."""
    run = folder / "full"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "run", run)
    largest = max(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (chance.randint(1, largest + 10_000), hard))
    arguments = ["train", "--quiet", "--resume", str(run), f"train.steps={LONGER}"]
    try:
        wrong = fault_of(arguments, codes=(0, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    wrong = wrong or fault_of(arguments, codes=(0,))
    if wrong is not None:
        return wrong
    return None if _equal(run, folder / "whole") else "resumed to another run"


def checkpoint_fault(folder: Path, chance: random.Random) -> str | None:
    """A checkpoint whose writer meets a limit, in torch's words or safetensors': one line, the earlier one intact."""
    import safetensors.torch
    import torch

    checkpoints = Checkpoints(folder / "checkpoints")
    if not checkpoints.steps():
        checkpoints.write(2, lambda path: (path / "state").write_text("earlier") and None)
    save: Callable[..., object] = chance.choice([torch.save, safetensors.torch.save_file])
    count = chance.randint(1, 2**20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (chance.randint(1, 4 * count), hard))
    try:
        checkpoints.write(4, lambda path: save({"w": torch.zeros(count)}, path / "weights") and None)  # type: ignore[arg-type]
        return "written beyond the limit"
    except RunError as error:
        if "\n" in str(error) or "cannot write the checkpoint" not in str(error):
            return str(error)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    latest = checkpoints.latest()
    return None if latest is not None and latest.step == 2 and checkpoints.steps() == [2] else "the earlier one is gone"
