"""Recorded rollouts through our loop and through each adapter: the same mixed groups, the same advantages to 1e-6."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from r3.method.mixed import StepResult
from r3.method.settings import MethodSettings
from tests.integrations import contract

RUNNERS = {"trl": contract.run_trl, "verl": contract.run_verl}
NEEDS = {"trl": "pip install 'r3-rl[trl]'", "verl": "make test-verl"}
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepResult]]:
    folder = tmp_path_factory.mktemp("contract")
    return folder, contract.run_loop(folder)


def test_the_recording_calls_on_all_three_mechanisms(ours: tuple[Path, list[StepResult]]) -> None:
    """Or the contract would hold for nothing."""
    _, results = ours
    for name in ("replay/joined", "groups/reflection", "ranking/groups", "groups/solve_all", "groups/solve_none"):
        assert sum(result.counts[name] for result in results) > 0, name


def test_same_mixed_groups_and_advantages(ours: tuple[Path, list[StepResult]]) -> None:
    """In TRL; verl/test_fit.py holds verl's trainers to it, whose runs it looks at anyway."""
    pytest.importorskip("trl", reason=f"needs trl: {NEEDS['trl']}")
    folder, expected = ours
    contract.agree(contract.run_trl(folder), expected)


@pytest.mark.parametrize("variant", ["maxrl", "reinforce++"])
@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_advantages_of_newer_methods_are_the_same(tmp_path: Path, trainer: str, variant: str) -> None:
    pytest.importorskip(trainer, reason=f"needs {trainer}: {NEEDS[trainer]}")
    for name in ("loop", trainer):
        (tmp_path / name).mkdir()
    expected = contract.run_variant(tmp_path / "loop", variant)
    contract.agree(RUNNERS[trainer](tmp_path / trainer, variant), expected)
    plain = contract.run_loop(tmp_path / "loop")
    others = [mixed.advantages for result in plain for mixed in result.groups]
    assert [mixed.advantages for result in expected for mixed in result.groups] != others


def test_the_method_in_one_file_decides_the_same(tmp_path: Path) -> None:
    """nano_r3 has no length bonus and centres SERR's rewards; everything else is as in the recording."""
    settings = {"reward__length_bonus": "false", "method__ranking__centred": "true"}
    results = contract.run_loop(tmp_path, **settings)
    ranking = {"centred": True, "peak_fraction": 0.25}
    acted: Counter[str] = Counter()
    for mixed, rows in contract.run_nano(results, MethodSettings(name="r3-paper", ranking=ranking)):
        assert [row.answer.tokens for row in rows] == [m.sample.tokens.tolist() for m in mixed.members]
        assert [row.replayed for row in rows] == [m.origin == "replayed" for m in mixed.members]
        np.testing.assert_allclose([row.advantage for row in rows], mixed.advantages, rtol=0, atol=1e-6)
        acted.update({"replayed": len(mixed.replayed), "ranked": mixed.ranked, mixed.group.context.kind: 1})
    assert all(acted[name] for name in ("replayed", "ranked", "plain", "reflection")), acted
