"""Hostile answers, each in its place between answers of honest people: none is right, and none disturbs another.

Covers r3.verify.sandbox.inside.answer, r3.verify.sandbox.inside.tester,
r3.verify.sandbox.inside.messages, r3.verify.sandbox.inside.remote, r3.verify.sandbox.inside.walls,
r3.verify.sandbox.inside.linux.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from r3.verify.sandbox import Job, Outcome, Sandbox, SandboxSettings, pool

from .hostile import CHEATS, DOUBLE_TESTS, HOGS, REACHES, SECRET_TESTS

MODES = ("root", "user", "landlock")
HONEST = Job("def double(x):\n    return x + x", DOUBLE_TESTS)


@pytest.fixture(scope="module", params=MODES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox for each kind of walls that this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pool._MODES, "auto", (request.param,))
        box = Sandbox(SandboxSettings(seconds=2, memory_mb=256, workers=2))
        try:
            box.start()
        except pool.VerifierError as error:
            pytest.skip(f"not on this machine: {error}")
        yield box
        box.close()


def judged(sandbox: Sandbox, codes: dict[str, str], tests: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of hostile answers, after checking that the honest ones among them are right."""
    jobs = [job for code in codes.values() for job in (Job(code, tests), HONEST)]
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(sandbox.judge, jobs))
    assert {outcome.reason for outcome in outcomes[1::2]} == {"pass"}
    return dict(zip(codes, outcomes[::2], strict=True))


@pytest.fixture(scope="module")
def cheats(sandbox: Sandbox) -> dict[str, Outcome]:
    return judged(sandbox, CHEATS, SECRET_TESTS)


@pytest.fixture(scope="module")
def reaches(sandbox: Sandbox) -> dict[str, Outcome]:
    return judged(sandbox, REACHES, DOUBLE_TESTS)


@pytest.fixture(scope="module")
def hogs(sandbox: Sandbox) -> dict[str, Outcome]:
    return judged(sandbox, HOGS, DOUBLE_TESTS)


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(cheats: dict[str, Outcome], name: str) -> None:
    assert cheats[name].passed == 0
    assert cheats[name].reason not in ("pass", "bad test", "")


@pytest.mark.parametrize("name", REACHES)
def test_nothing_is_within_reach(reaches: dict[str, Outcome], name: str) -> None:
    assert reaches[name].passed == 0
    assert reaches[name].reason in ("exception", "crashed"), reaches[name]


@pytest.mark.slow  # each hog runs into its limit, in three kinds of walls
@pytest.mark.parametrize("name", HOGS)
def test_no_hog_passes(hogs: dict[str, Outcome], name: str) -> None:
    assert hogs[name].passed == 0
    assert hogs[name].reason not in ("pass", "bad test", "")


def test_there_are_enough_of_them() -> None:
    assert len(CHEATS) + len(REACHES) + len(HOGS) >= 80
    assert not list(Path("/tmp").glob("r3-owned*"))
