"""Files that are not ours, damaged, or out of space: one clear line, nothing lost, no wrong data.

Covers r3.buffer.database, r3.buffer.damage.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from r3.buffer import SampleBuffer, SampleBufferError, salvage
from tests.buffer.helpers import everything, make_sample, rounded, state

QUERIES = [f"q{i}" for i in range(7)]
SAMPLES = {i + 1: make_sample(i, f"q{i % 7}", length=50 + 9 * i, step=i // 10) for i in range(120)}
EXPECTED = {number: rounded(sample) for number, sample in SAMPLES.items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add(SAMPLES.values())
    return path


# -------------------------------------------------------------------- files of others


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE samples (id INTEGER)")
    db.close()


def _foreign_with_log(path: Path) -> None:
    _foreign(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()


def _later_version(path: Path) -> None:
    SampleBuffer(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("step,reward\n" * 1000), "not a sample buffer"),
        (lambda path: path.write_text("x"), "not a sample buffer"),
        (_foreign, "another program"),
        (_foreign_with_log, "another program"),
        (_later_version, "schema 7.*upgrade"),
        (lambda path: path.mkdir(), "check the path|directory"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_files_of_others_are_refused_and_left_alone(tmp_path, make, message, read_only):
    path = tmp_path / "theirs"
    make(path)
    (tmp_path / "theirs.lock").unlink(missing_ok=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(SampleBufferError, match=message) as raised:
        SampleBuffer(path, read_only=read_only)
    assert str(path) in str(raised.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_an_empty_file_becomes_a_buffer_and_a_half_made_one_is_replaced(tmp_path):
    path = tmp_path / "buffer.sqlite"
    path.touch()
    (tmp_path / "buffer.sqlite.new").write_bytes(b"a writer was killed while it made this")
    with SampleBuffer(path) as buffer:
        assert buffer.add([make_sample(1)]) == [1]
    assert not (tmp_path / "buffer.sqlite.new").exists()


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(SampleBufferError, match="check that its directory exists"):
        SampleBuffer(tmp_path / "missing" / "buffer.sqlite")


def test_a_reader_and_a_second_writer_do_not_drop_the_writers_locks(tmp_path):
    """POSIX locks belong to the process: closing any plain descriptor of the file would drop those of SQLite."""
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add([make_sample(1)])
        SampleBuffer.open_reader(path).close()
        with pytest.raises(SampleBufferError):
            SampleBuffer(path)
        # The last connection to close removes the log: another process must see that it is not the last.
        code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT * FROM steps'); db.close()"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        assert os.path.exists(f"{path}-wal")
        buffer.add([make_sample(2)])
    with SampleBuffer(path) as buffer:
        assert buffer.stats().samples == 2


# -------------------------------------------------------------------- damage


def _damaged(sound: Path, path: Path, seed: int) -> None:
    """A copy with one page overwritten (even seeds) or a few bytes flipped (odd ones)."""
    dice = np.random.default_rng(seed)
    content = bytearray(sound.read_bytes())
    page = int(dice.integers(1, len(content) // 4096))
    if seed % 2:
        at = page * 4096 + int(dice.integers(4000))
        content[at : at + 8] = bytes(byte ^ 0x55 for byte in content[at : at + 8])
    else:
        content[page * 4096 : (page + 1) * 4096] = dice.bytes(4096)
    path.write_bytes(content)


def _names_the_fix(path: Path, error: SampleBufferError) -> bool:
    return str(path) in str(error) and ("salvage" in str(error) or "backup" in str(error))


def _readable(path: Path) -> tuple[dict[int, dict], list[str]]:
    """What can be read of a damaged buffer, query by query, and the problems that it admits to."""
    found: dict[int, dict] = {}
    with SampleBuffer(path) as buffer:
        problems = buffer.check()
        for query in QUERIES:
            try:
                found |= everything(buffer, [query])
            except SampleBufferError as error:
                problems.append(str(error))
                assert _names_the_fix(path, error)  # noqa: PT017  # damage may or may not touch this query
    return found, problems


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_noticed_and_never_read_as_data(sound, tmp_path, seed):
    path = tmp_path / "buffer.sqlite"
    _damaged(sound, path, seed)
    try:
        found, problems = _readable(path)
    except SampleBufferError as error:
        assert _names_the_fix(path, error)  # noqa: PT017  # damage may or may not keep it from opening
        return
    assert found == {number: EXPECTED[number] for number in found}
    if found != EXPECTED:
        assert problems


@pytest.mark.parametrize("seed", range(40))
def test_the_rest_of_a_damaged_file_is_salvaged(sound, tmp_path, seed):
    path, saved = tmp_path / "buffer.sqlite", tmp_path / "saved.sqlite"
    _damaged(sound, path, seed)
    report = salvage(path, saved)
    with SampleBuffer(saved) as buffer:
        rescued = everything(buffer, QUERIES)
        assert buffer.check() == []
    assert rescued == {number: EXPECTED[number] for number in rescued}
    assert len(rescued) == report.samples
    assert not set(report.unreadable) & set(rescued)
    if report.missing is not None:
        assert report.missing == len(EXPECTED) - len(rescued)


def _sound_state(sound: Path) -> tuple:
    with SampleBuffer.open_reader(sound) as buffer:
        return state(buffer, QUERIES)


def test_salvage_of_a_sound_file_is_an_equal_one(tmp_path):
    path, saved = tmp_path / "buffer.sqlite", tmp_path / "saved.sqlite"
    with SampleBuffer(path, per_query=5, total=30) as buffer:
        buffer.add(SAMPLES.values())
        buffer.settle(6)
        before = state(buffer, QUERIES)
    assert salvage(path, saved).missing == 0
    with SampleBuffer(saved, per_query=5, total=30) as copy, SampleBuffer(path, per_query=5, total=30) as original:
        assert state(copy, QUERIES) == before
        assert copy.check() == []
        assert copy.forget_after(8) == original.forget_after(8)
        assert state(copy, QUERIES) == state(original, QUERIES)
    with pytest.raises(SampleBufferError, match="exists already"):
        salvage(path, saved)


def test_a_lost_ledger_is_rebuilt_from_the_samples(sound, tmp_path):
    path, saved = tmp_path / "buffer.sqlite", tmp_path / "saved.sqlite"
    shutil.copy(sound, path)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM attempts WHERE query = 3")
    db.close()
    with SampleBuffer(path) as buffer:
        assert any("totals" in problem for problem in buffer.check())
    report = salvage(path, saved)
    assert not report.ledger_kept
    with SampleBuffer(saved) as buffer:
        assert state(buffer, QUERIES) == _sound_state(sound)


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.5, 0.99])
def test_a_truncated_file_is_noticed(sound, tmp_path, share):
    path = tmp_path / "buffer.sqlite"
    content = sound.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(SampleBufferError, match=str(path)), SampleBuffer(path) as buffer:
        everything(buffer, QUERIES)


# -------------------------------------------------------------------- no space


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB where we may mount one, else None."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = os.geteuid() == 0 and shutil.which("mount") is not None
    done = (
        done
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "r3", disk], capture_output=True).returncode == 0
    )
    yield disk if done else None
    if done:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_space(small_disk, tmp_path):
    if small_disk is None:
        _fill_under_a_file_size_limit(tmp_path)
        return
    path, ballast = small_disk / "buffer.sqlite", small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    expected: dict[int, dict] = {}
    with SampleBuffer(path) as buffer:
        with pytest.raises(SampleBufferError) as raised:  # noqa: PT012  # the add that hits the wall is not known
            for step in range(1000):
                samples = [make_sample(10 * step + i, f"q{i % 7}", length=2_000, step=step) for i in range(10)]
                expected |= dict(zip(buffer.add(samples), map(rounded, samples), strict=True))
        assert str(path) in str(raised.value)
        assert "bytes are free" in str(raised.value)
        assert len(expected) >= 10
        assert everything(buffer, QUERIES) == expected
        assert buffer.check() == []
        ballast.unlink()
        expected |= dict(zip(buffer.add(samples), map(rounded, samples), strict=True))
        assert everything(buffer, QUERIES) == expected
    with SampleBuffer(path) as buffer:
        assert everything(buffer, QUERIES) == expected
        assert buffer.check() == []


def test_a_reader_opens_a_file_on_a_read_only_disk(small_disk, tmp_path):
    directory = small_disk or tmp_path
    path = directory / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add([make_sample(1, "q1")])
    if small_disk is None:
        directory.chmod(0o555)
    else:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        with SampleBuffer.open_reader(path) as reader:
            assert everything(reader, QUERIES) == {1: rounded(make_sample(1, "q1"))}
        with pytest.raises(SampleBufferError, match="open the buffer read-only"):
            SampleBuffer(path)
    finally:
        if small_disk is None:
            directory.chmod(0o755)


def test_a_file_size_limit_loses_nothing(tmp_path):
    _fill_under_a_file_size_limit(tmp_path)


def _fill_under_a_file_size_limit(tmp_path: Path) -> None:
    """The same wall without a mount: the kernel refuses to let a file of the child grow beyond 2 MB."""
    path = tmp_path / "limited.sqlite"
    code = """
import resource, signal, sys
from r3.buffer import SampleBuffer, SampleBufferError
from tests.buffer.helpers import make_sample
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
with SampleBuffer(sys.argv[1]) as buffer:
    try:
        for step in range(1000):
            buffer.add([make_sample(10 * step + i, f"q{i % 7}", length=2_000, step=step) for i in range(10)])
    except SampleBufferError as error:
        print(error)
    print(buffer.stats().samples, buffer.check())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    buffer.add([make_sample(10 * step + i, f"q{i % 7}", length=2_000, step=step) for i in range(10)])
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    error, found = done.stdout.splitlines()
    assert str(path) in error
    assert "bytes are free" in error
    acknowledged, problems = found.split(" ", 1)
    assert problems == "[]"
    with SampleBuffer(path) as buffer:
        stored = everything(buffer, QUERIES)
        assert len(stored) == int(acknowledged) + 10
        for number, fields in stored.items():
            seed = number - 1
            assert fields == rounded(make_sample(seed, f"q{seed % 10 % 7}", length=2_000, step=seed // 10))
