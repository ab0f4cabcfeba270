from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.faults import SmallDisk, small_disk


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that is soon full. Without the right to mount one, both kinds are a limit on the size of files."""
    path = tmp_path / "disk"
    path.mkdir()
    with small_disk(path, tmpfs=request.param == "tmpfs") as made:
        yield made
