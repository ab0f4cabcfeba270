"""Training on what another run solved neither too seldom nor too often, through `r3 train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from tests.train.tiny import overrides

EVERY = [f"q{i}" for i in range(8)]  # twelve problems, of which the last four are held out


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one step in which every problem was tried sixteen times."""
    folder = tmp_path_factory.mktemp("surveyed")
    once = {"method": "grpo", "train.steps": 1, "train.queries_per_step": 8, "rollout.group_size": 16}
    settings = overrides(folder, **{key.replace(".", "__"): value for key, value in once.items()})
    assert main(["train", "--quiet", *settings, f"run.dir={folder / 'survey-1'}"]) == 0
    return folder


def shares(run: Path) -> dict[str, float]:
    """Each query's share of right answers, counted one by one."""
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        drawn = buffer.history(EVERY, limit=1000)
    return {query: sum(bool(s.outcome) for s in found) / len(found) for query, found in drawn.items() if found}


@pytest.mark.parametrize("without", ["lowest", "highest", "both"])
def test_only_problems_within_the_range_are_trained_on(
    surveyed: Path, tmp_path: Path, without: str, caplog: pytest.LogCaptureFixture
) -> None:
    rates = shares(surveyed / "survey-1")
    assert set(rates) == set(EVERY)
    seen = sorted(set(rates.values()))
    assert len(seen) > 2
    fewest = seen[0] if without == "highest" else seen[1]  # both ends of the range belong to it
    most = seen[-1] if without == "lowest" else seen[-2]
    wanted = {query for query, rate in rates.items() if fewest <= rate <= most}
    assert 0 < len(wanted) < len(EVERY)
    chosen = [f"task.pass_rates_from={surveyed}/survey-{{seed}}", f"task.min_pass_rate={fewest}"]
    chosen += [f"task.max_pass_rate={most}", "method=grpo", "train.epochs=2", f"run.dir={tmp_path / 'run'}"]
    assert main(["train", "--quiet", *overrides(surveyed), *chosen]) == 0
    assert set(shares(tmp_path / "run")) == wanted
    assert f"8 of 8 training problems were tried there; the {len(wanted)} with a pass rate" in caplog.text


def test_what_cannot_be_chosen_from_is_refused(
    surveyed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*settings: str, code: int = 2) -> str:
        assert main(["train", "--quiet", *overrides(surveyed), f"run.dir={tmp_path / 'run'}", *settings]) == code
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    source = f"task.pass_rates_from={surveyed / 'survey-1'}"
    assert "8 of 8 training problems were tried there, none of them with a pass rate from 0.98 to 0.99" in refused(
        source, "task.min_pass_rate=0.98", "task.max_pass_rate=0.99"
    )
    assert "0 of 8 training problems were tried there" in refused(source, "task.id_column=problem")
    assert "not a run directory" in refused(f"task.pass_rates_from={tmp_path / 'nowhere'}", code=1)
    assert "need pass_rates_from" in refused("task.max_pass_rate=0.5")
    assert "min_pass_rate=0.5 is above max_pass_rate=0.4" in refused(
        source, "task.min_pass_rate=0.5", "task.max_pass_rate=0.4"
    )
