"""Settings shared by all tests: property tests are repeatable and have no deadline (CI machines stall). And fixtures of
several test files, whose rooms are imported only by those that ask for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from r3.verify import MathVerifier
    from tests.run.faults import SmallDisk

# The test processes share the cores: torch in each of them, and in the runs they start, must not take all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything imports Triton: where there is no card, its kernels run in Triton's interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

settings.register_profile("r3", deadline=None, derandomize=True, max_examples=150, print_blob=True)
settings.load_profile("r3")


@pytest.fixture
def report_gap(record_property: Callable[[str, object], None]) -> Callable[[float], None]:
    """Keeps a mean difference of vLLM's and the trainer's log-probs for the last lines."""
    return lambda gap: record_property("gap", gap)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "gap":
                line = f"mean difference of vLLM's and the trainer's log-probs: {value:.1e}"
                terminalreporter.write_line(f"{line}  {report.nodeid.rpartition('/')[2]}")


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that is soon full. Without the right to mount one, both kinds are a limit on the size of files."""
    from tests.run.faults import small_disk

    path = tmp_path / "disk"
    path.mkdir()
    with small_disk(path, tmpfs=request.param == "tmpfs") as made:
        yield made


@pytest.fixture(scope="session")
def verifier() -> Iterator[MathVerifier]:
    """One verifier for the tests that only ask it questions."""
    from r3.verify import MathVerifier

    with MathVerifier() as one:
        yield one


@pytest.fixture(scope="session")
def strict_verifier() -> Iterator[MathVerifier]:
    """For answers that are wrong anyway and try to take for ever: they get less time."""
    from r3.verify import MathSettings, MathVerifier

    with MathVerifier(MathSettings(seconds=0.2)) as one:
        yield one
