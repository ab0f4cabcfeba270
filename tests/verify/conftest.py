from __future__ import annotations

from collections.abc import Iterator

import pytest

from r3.verify import MathSettings, MathVerifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[MathVerifier]:
    """One verifier for the tests that only ask it questions; a busy machine gets twice the time."""
    with MathVerifier(MathSettings(seconds=2)) as one:
        yield one
