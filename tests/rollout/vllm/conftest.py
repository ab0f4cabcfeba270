"""Says at the end how far vLLM's log-probs were from the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_GAPS = pytest.StashKey[dict[str, float]]()


@pytest.fixture
def report_gap(request: pytest.FixtureRequest) -> Callable[[float], None]:
    """Keeps a mean difference of log-probs for the summary."""

    def report(gap: float) -> None:
        request.config.stash.setdefault(_GAPS, {})[request.node.nodeid.rpartition("/")[2]] = gap

    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, gap in config.stash.get(_GAPS, {}).items():
        terminalreporter.write_line(f"mean difference of vLLM's and the trainer's log-probs: {gap:.1e}  {name}")
