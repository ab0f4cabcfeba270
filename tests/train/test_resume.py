"""Killed with SIGKILL anywhere and resumed, a run writes what it would have written; else the resume says why not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics

SETTINGS = {"train__epochs": 4, "run__checkpoint_every": 3}  # 8 steps, an epoch is 2; checkpoints at 3, 6 and 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", "--quiet", *overrides(folder, **SETTINGS)]) == 0
    return folder


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda run: any(run.glob(pattern))


def lines(count: int) -> Callable[[Path], bool]:
    def reached(run: Path) -> bool:
        path = run / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= count

    return reached


# Moments found by what is on disk: no clock is involved, and each is somewhere else in the loop.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before the first checkpoint": lines(2),
    "while a checkpoint is written": exists("checkpoints/.step-000003.tmp-*"),
    "after the checkpoint, in the middle of a step": exists("checkpoints/step-000003"),
    "at an epoch's end": lines(5),
    "after rollouts, before metrics": exists("rollouts/step-000006.jsonl.gz"),
    "while the second checkpoint is written": exists("checkpoints/.step-000006.tmp-*"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, uninterrupted: Path, moment: str) -> None:
    run = tmp_path / "run"
    arguments = overrides(
        tmp_path, **SETTINGS, model__path=uninterrupted / "model", task__path=uninterrupted / "task.jsonl"
    )
    process = subprocess.Popen(command("train", "--quiet", *arguments), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not MOMENTS[moment](run):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert read_metrics(run) == read_metrics(uninterrupted / "run")
    assert contents(tmp_path) == contents(uninterrupted)
    last = "checkpoints/step-000008/policy/model.safetensors"
    assert (run / last).read_bytes() == (uninterrupted / "run" / last).read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_in_a_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, uninterrupted: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    arguments = overrides(
        tmp_path, **SETTINGS, model__path=uninterrupted / "model", task__path=uninterrupted / "task.jsonl"
    )
    process = subprocess.Popen(
        command("train", "--quiet", *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(number)
            break
    _, errors = process.communicate()
    assert process.returncode == code
    assert f"r3 train --resume {run}" in errors
    assert any((run / "checkpoints").glob("step-*"))
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert read_metrics(run) == read_metrics(uninterrupted / "run")


# A resume that cannot be exact says which part is missing, older or changed, and changes no byte of the run.


STEPS = 4
LONG_RUN = {"train__epochs": 40, "run__checkpoint_every": 2, "evaluate__every": 2}


def run_to(folder: Path, steps: int) -> Path:
    assert main(["train", "--quiet", *overrides(folder, **LONG_RUN, train__steps=steps)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with its model and task beside it; and in `longer` the same run of six."""
    folder = tmp_path_factory.mktemp("finished")
    run_to(folder, STEPS)
    (folder / "run").rename(folder / "four")
    run_to(folder, 6)
    (folder / "run").rename(folder / "six")
    (folder / "four").rename(folder / "run")
    return folder


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def snapshot(run: Path) -> dict[str, str]:
    """Every file's digest, but of the lock's note and of SQLite's shared memory, which hold no data."""
    ignored = ("lock", "buffer.sqlite.lock", "buffer.sqlite-shm")
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in ignored
    }


def refused(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line with which a resume is refused, after which every file is as before."""
    before = snapshot(run)
    capsys.readouterr()
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=6", *more]) == 1
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1, lines
    assert lines[0].startswith("r3: ")
    after = {name: digest for name, digest in snapshot(run).items() if name != "buffer.sqlite-wal" or name in before}
    assert after == before
    return lines[0]


def goes_on(run: Path, finished: Path, *more: str) -> None:
    """It resumes, and is then the run that was never interrupted."""
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=6", *more]) == 0
    assert read_metrics(run) == read_metrics(finished / "six")


def lose_checkpoints(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "unmounted")


def lose_checkpoints_and_buffer(run: Path) -> None:
    lose_checkpoints(run)
    (run / "buffer.sqlite").unlink()


def lose_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def lose_buffer(run: Path) -> None:
    (run / "buffer.sqlite").unlink()


def empty_buffer(run: Path) -> None:
    lose_buffer(run)
    SampleBuffer(run / "buffer.sqlite").close()


def zero_bytes(run: Path) -> None:
    (run / "buffer.sqlite").write_bytes(b"")


def cut_buffer(run: Path) -> None:
    path = run / "buffer.sqlite"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def older_buffer(run: Path) -> None:
    with SampleBuffer(run / "buffer.sqlite") as buffer:
        buffer.forget_after(3)


def edited_sample(run: Path) -> None:
    """Another sample in the place of one: every count is as before."""
    with SampleBuffer(run / "buffer.sqlite") as buffer:
        step = [sample for sample in buffer.find(range(1, 10_000)).values() if sample.step == STEPS]
        buffer.forget_after(STEPS - 1)
        changed = [replace(sample, id=None, reward=sample.reward + (i == 0)) for i, sample in enumerate(step)]
        buffer.add(changed)


def lost_rows(run: Path) -> None:
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute("DELETE FROM samples WHERE id IN (SELECT id FROM samples LIMIT 3)")
    db.close()


def old_checkpoints(run: Path) -> None:
    """From a backup made before the buffer let go of what a rewind to them would need."""
    shutil.rmtree(run / "checkpoints" / "step-000004")
    with SampleBuffer(run / "buffer.sqlite") as buffer:
        buffer.settle(3)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "checkpoints gone": (lose_checkpoints, "checkpoints: no checkpoint is there, but the run wrote one of step 4"),
    "checkpoints and buffer gone": (lose_checkpoints_and_buffer, "but the run wrote one of step 4"),
    "metrics gone": (lose_metrics, "metrics.jsonl: missing, though there are checkpoints"),
    "buffer gone": (lose_buffer, "buffer.sqlite: missing, and the checkpoint of step 4 needs its samples"),
    "buffer emptied": (empty_buffer, "buffer.sqlite: empty, older than the checkpoint of step 4"),
    "buffer of no bytes": (zero_bytes, "buffer.sqlite"),
    "buffer cut": (cut_buffer, "buffer.sqlite: the file is damaged"),
    "buffer older": (older_buffer, "buffer.sqlite: ends at step 3, older than the checkpoint of step 4"),
    "buffer edited": (edited_sample, "not what it was at the checkpoint of step 4 (digest differ)"),
    "buffer lost rows": (lost_rows, "3 of the samples that it lists are missing"),
    "checkpoints older": (old_checkpoints, "older than what"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_or_older_part_is_named_and_nothing_changed(
    fault: str, run: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "whole")
    apply, message = FAULTS[fault]
    apply(run)
    assert message in refused(run, capsys)
    # With the part put back it goes on as if nothing had been.
    for name in ("checkpoints", "metrics.jsonl", "buffer.sqlite"):
        source, target = tmp_path / "whole" / name, run / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)
    for name in ("buffer.sqlite-wal", "buffer.sqlite-shm"):
        (run / name).unlink(missing_ok=True)
    if fault == "checkpoints gone":
        goes_on(run, finished)


def test_a_deleted_log_of_the_buffer_is_noticed(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, a run leaves its newest samples in SQLite's log; without it the buffer is older than the checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    with SampleBuffer(run / "buffer.sqlite") as buffer:
        samples = [sample for sample in buffer.find(range(1, 10_000)).values() if sample.step == STEPS]
        buffer.forget_after(STEPS - 1)
        buffer._open_db().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        buffer.add([replace(sample, id=None) for sample in samples])
        shutil.copyfile(run / "buffer.sqlite", tmp_path / "main")  # as a SIGKILL now would leave it
        shutil.copyfile(run / "buffer.sqlite-wal", tmp_path / "log")
    shutil.copyfile(tmp_path / "main", run / "buffer.sqlite")
    assert "buffer.sqlite: ends at step 3" in refused(run, capsys)
    (run / "buffer.sqlite-shm").unlink(missing_ok=True)
    shutil.copyfile(tmp_path / "log", run / "buffer.sqlite-wal")
    goes_on(run, finished)


@pytest.mark.parametrize("name", ["buffer.sqlite", "buffer.sqlite-wal"])
def test_a_buffer_removed_under_a_live_run_stops_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from r3.train.loop import Trainer

    real = Trainer.train_step

    def step(trainer: Trainer, *arguments: object) -> object:
        if trainer.step == 2:
            (tmp_path / "run" / name).unlink()
        return real(trainer, *arguments)

    monkeypatch.setattr(Trainer, "train_step", step)
    assert main(["train", "--quiet", *overrides(tmp_path, **LONG_RUN, train__steps=4)]) == 1
    errors = capsys.readouterr().err.strip()
    assert f"{name}: removed or replaced while it was being written to" in errors
    assert "Traceback" not in errors


def change_rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "task.jsonl"
        path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))

    return apply


def swap_token_ids(folder: Path) -> None:
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))


ADDED = '{"id": "new", "problem": "What is 77 + 1?", "answer": "30"}'
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows appended": (change_rows(lambda rows: [*rows, ADDED]), "(8 problems then, 9 now)"),
    "a row changed": (change_rows(lambda rows: [rows[0].replace("0 + 0", "0 + 1"), *rows[1:]]), "the training data"),
    "rows reordered": (change_rows(lambda rows: [rows[1], rows[0], *rows[2:]]), "the training data"),
    "a held-out row changed": (change_rows(lambda rows: [*rows[:-1], rows[-1].replace("+", "-")]), "the held-out data"),
    "token ids swapped": (swap_token_ids, "the tokenizer changed since the run began"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_or_tokenizer_is_refused_or_noted(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_to(tmp_path, 2)
    apply, message = CHANGES[change]
    apply(tmp_path)
    line = refused(run, capsys)
    assert message in line
    assert "--allow-changed-data" in line
    assert main(["train", "--quiet", "--resume", str(run), "--allow-changed-data", "train.steps=4"]) == 0
    info = json.loads((run / "run.json").read_text())
    assert info["resumes"][-1]["changed_inputs"]
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=6"]) == 0  # what was accepted is the norm now


def test_a_run_of_an_earlier_version_resumes_with_a_word_on_what_was_not_checked(
    run: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = json.loads((run / "run.json").read_text())
    del info["inputs"], info["checkpoint"]
    (run / "run.json").write_text(json.dumps(info))
    for folder in (run / "checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "buffer.json").unlink()
        del manifest["files"]["buffer.json"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute("DROP TABLE digests")
    db.close()
    goes_on(run, finished)
    said = [record.getMessage() for record in caplog.records]
    assert sum("written by an earlier version" in line for line in said) == 2
    assert all("\n" not in line for line in said)


def test_an_earlier_versions_run_without_its_checkpoints_does_not_start_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = json.loads((run / "run.json").read_text())
    del info["inputs"], info["checkpoint"]
    (run / "run.json").write_text(json.dumps(info))
    lose_checkpoints(run)
    assert "but the run wrote one of step 2" in refused(run, capsys)  # the buffer has settled until there
    (run / "buffer.sqlite").unlink()
    assert "empty or not there, but the run reached step 4" in refused(run, capsys)


def test_a_lower_learning_rate_is_kept_by_later_resumes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=5", "train.learning_rate=5e-4"]) == 0
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=6"]) == 0
    assert [line["update/learning_rate"] for line in read_metrics(run)[1:]] == [1e-3] * 4 + [5e-4] * 2
    resumes = json.loads((run / "run.json").read_text())["resumes"]
    assert resumes[0]["settings"] == {"train.steps": 5, "train.learning_rate": 5e-4}
    assert main(["train", "--resume", str(run), "train.learning_rate=1e-3"]) == 2  # only downwards
    assert "was made with other settings (train.learning_rate)" in capsys.readouterr().err
