"""SIGKILL at any moment loses nothing: the resumed run's files equal the uninterrupted run's, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.faults import python

ROOT = Path(__file__).parents[2]


def run_experiment(*arguments: str) -> int:
    process = python("-m", "tests.run.faults", *arguments, cwd=ROOT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return int(output)


def test_a_run_killed_at_each_of_its_file_operations_resumes_exactly(tmp_path: Path) -> None:
    assert run_experiment("everywhere", str(tmp_path), "5") > 60


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_again_and_again_resumes_exactly(tmp_path: Path, seed: int) -> None:
    assert run_experiment("often", str(tmp_path), "24", str(seed)) >= 2
