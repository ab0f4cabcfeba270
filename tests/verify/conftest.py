from __future__ import annotations

from collections.abc import Iterator

import pytest

from r3.verify import MathSettings, MathVerifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[MathVerifier]:
    """One verifier for the tests that only ask it questions."""
    with MathVerifier() as one:
        yield one


@pytest.fixture(scope="session")
def strict_verifier() -> Iterator[MathVerifier]:
    """For answers that are wrong anyway and try to take for ever: they get less time."""
    with MathVerifier(MathSettings(seconds=0.2)) as one:
        yield one
