"""Writers that are killed, and readers beside a writer: with real processes.

Run as a program, this file is such a writer: it adds small batches for ever and acknowledges each on standard output.

Covers r3.locks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from r3.buffer import SampleBuffer
from tests.buffer.helpers import everything, make_sample, rounded

ROOT = Path(__file__).parents[2]
QUERIES = [f"q{i}" for i in range(5)]


def _batch(first_id: int) -> list:
    """The batch that starts with this id: its samples follow from it, so that any reader can tell what they were."""
    return [
        make_sample(first_id + i, f"q{(first_id + i) % 5}", length=1 + (first_id + i) * 37 % 700, step=first_id)
        for i in range(1 + first_id % 7)
    ]


def _write() -> None:
    with SampleBuffer(sys.argv[1], per_query=None, total=None) as buffer:
        stats = buffer.stats()
        next_id = stats.samples + 1
        while True:
            ids = buffer.add(_batch(next_id))
            assert ids[0] == next_id
            next_id = ids[-1] + 1
            os.write(1, f"{ids[-1]}\n".encode())


def _start_writer(path: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.buffer.test_processes", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def _expected(samples: int) -> dict[int, dict]:
    """What a buffer of so many samples holds."""
    expected: dict[int, dict] = {}
    while len(expected) < samples:
        first = len(expected) + 1
        expected |= {first + i: rounded(sample) for i, sample in enumerate(_batch(first))}
    assert len(expected) == samples, "the buffer holds part of a batch"
    return expected


def test_no_acknowledged_sample_is_lost_when_the_writer_is_killed(tmp_path):
    """30 rounds on one growing file; each kill falls somewhere in an add, a commit, a checkpoint or the opening."""
    path = tmp_path / "buffer.sqlite"
    dice = random.Random(0)
    for round_ in range(30):
        acknowledged = 0
        with _start_writer(path) as writer:
            assert writer.stdout is not None
            if round_ % 6:  # in every sixth round it is killed while it starts
                for _ in range(dice.randrange(1, 25)):
                    acknowledged = int(writer.stdout.readline())
            for _ in range(dice.randrange(200_000)):
                pass  # up to some milliseconds, so that the kill falls anywhere between two answers
            writer.kill()
            rest = writer.stdout.read().splitlines()
            acknowledged = int(rest[-1]) if rest else acknowledged
        if not path.exists():
            assert acknowledged == 0  # killed before it had made the file
            continue
        # A writer moves the log into the file when it closes; a reader leaves it to the next writer to be killed over.
        opened = SampleBuffer(path) if round_ % 3 == 0 else SampleBuffer.open_reader(path)
        with opened as buffer:
            stored = buffer.stats().samples
            assert stored >= acknowledged
            assert everything(buffer, QUERIES) == _expected(stored)
            assert buffer.check() == []


def test_a_reader_sees_whole_batches_while_the_writer_writes(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with _start_writer(path) as writer:
        assert writer.stdout is not None
        acknowledged = int(writer.stdout.readline())
        with SampleBuffer.open_reader(path) as reader:
            sizes = [len(everything(reader, QUERIES))]
            assert sizes[0] >= acknowledged
            while len(set(sizes)) < 12:
                acknowledged = int(writer.stdout.readline())
                found = everything(reader, QUERIES)
                assert found == _expected(len(found))
                assert len(found) >= max(acknowledged, sizes[-1])
                assert reader.stats().samples >= len(found)
                sizes.append(len(found))
        writer.kill()


def test_a_reader_opens_what_a_killed_writer_left(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with _start_writer(path) as writer:
        assert writer.stdout is not None
        acknowledged = int(writer.stdout.readline())
        writer.kill()
    with SampleBuffer.open_reader(path) as reader:
        found = everything(reader, QUERIES)
        assert len(found) >= acknowledged
        assert found == _expected(len(found))


if __name__ == "__main__":
    _write()
