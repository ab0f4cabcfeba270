from __future__ import annotations

from collections.abc import Iterator

import pytest

from r3.verify import MathVerifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[MathVerifier]:
    """One verifier for the tests that only ask it questions."""
    with MathVerifier() as one:
        yield one
