"""What a run takes from another: its successes, its problems by their rates, a directory that an older r3 wrote.

Covers r3.train.build.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.run import RunFiles
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.tiny import ROOT, overrides, read_metrics, save_model


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run of two steps, in which every problem is met once."""
    run = tmp_path / "first"
    assert main(["train", "--quiet", *overrides(tmp_path, train__steps=2, run__dir=run)]) == 0
    return run


def second(folder: Path, first: Path, **more: Any) -> list[str]:
    settings = {"method": "rlep", "reward__length_bonus": "auto", "train__steps": 2, **more}
    return overrides(folder, buffer__successes_from=first, **settings)


def test_rlep_replays_the_successes_of_an_earlier_run_and_resumes_with_them(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *second(tmp_path, first)]) == 0
    with SampleBuffer.open_reader(first / "buffer.sqlite") as buffer:
        rows = list(RunFiles(tmp_path / "run").rollouts.read(1))
        past = buffer.history({row["query"] for row in rows}, outcome=True)
    replayed = [row for row in rows if row["origin"] == "replayed"]
    assert replayed
    for row in replayed:
        assert (row["step"], row["policy_version"], row["outcome"]) == (0, 0, True)
        assert math.isnan(row["id"])  # none: ids of two buffers would clash
        assert row["tokens"] in [sample.tokens.tolist() for sample in past[row["query"]]]
    own = RunFiles(tmp_path / "run").buffer_path
    with SampleBuffer.open_reader(own) as buffer:
        assert buffer.stats().samples == sum(line["groups"] for line in read_metrics(tmp_path / "run")[1:]) * 4
    assert main(["train", "--quiet", "--resume", str(tmp_path / "run"), "train.steps=3"]) == 0
    # The pool is part of what a run computes with: another would make another run of it.
    assert main(["train", "--quiet", "--resume", str(first), "train.steps=3"]) == 0
    capsys.readouterr()
    line = refused(capsys, "train", "--resume", tmp_path / "run", "train.steps=4", code=1)
    assert "the buffer of buffer.successes_from changed" in line


def test_a_run_that_is_missing_or_reads_other_texts_is_refused(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(settings: list[str]) -> str:
        capsys.readouterr()
        line = refused(capsys, "train", *settings)
        assert not (tmp_path / "run").exists()
        return line

    assert "buffer.successes_from: " in said(second(tmp_path, tmp_path / "none"))
    other = save_model(tmp_path / "other")
    tokenizer = copy.deepcopy(char_tokenizer())  # it is shared by all tests
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    assert "its tokenizer has another vocabulary" in said(second(tmp_path, first, model__path=other))
    info = json.loads((first / "run.json").read_text())
    del info["inputs"]["vocabulary"]
    (first / "run.json").write_text(json.dumps(info))
    assert "did not note its vocabulary" in said(second(tmp_path, first))


def test_a_run_of_other_problems_is_refused(tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": f"other{i}", "problem": f"{i}?", "answer": "50"} for i in range(12)]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    line = refused(capsys, "train", *second(tmp_path, first, task__path=tmp_path / "others.jsonl"))
    assert "it solved none of this run's 8 training problems (0 were tried)" in line


@pytest.mark.parametrize(
    ("method", "more"),
    [("exgrpo", {"method__revisit__start_at": "null"}), ("repo", {"method__replay__min_history": 4})],
)
def test_past_answers_are_replayed_once_queries_come_again(tmp_path: Path, method: str, more: dict[str, Any]) -> None:
    settings = overrides(tmp_path, method=method, reward__length_bonus="auto", train__steps=3, **more)
    assert main(["train", "--quiet", *settings]) == 0
    line = read_metrics(tmp_path / "run")[-1]
    assert line["replay/joined"] > 0
    assert line["update/grad_norm"] > 0


# Training on what another run solved neither too seldom nor too often, through `r3 train`.


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


# A run directory that an earlier version wrote (tests/data) opens in every command, and its training goes on.


STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "data" / "run_of_0.1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    return tmp_path / "run"


def test_it_is_of_an_earlier_version(run: Path) -> None:
    """Otherwise the other tests would show nothing."""
    config = (run / "config.yaml").read_text()
    assert "inputs" not in json.loads((run / "run.json").read_text())
    assert not (run / "checkpoints" / f"step-{STEPS:06d}" / "buffer.json").exists()
    # The settings of every family of tasks in one section, of which most are refused in a recipe today.
    assert {"difficulty", "family"} <= {line.strip().partition(":")[0] for line in config.splitlines()}


def test_it_shows_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert f"finished, step {STEPS} of {STEPS}" in capsys.readouterr().out
    query = open_runs([run])[0].tables.table(2).summaries[0]["query"]
    assert main(["show", str(run), "--group", f"2/{query}"]) == 0
    assert "advantage" in capsys.readouterr().out


def test_every_page_of_the_viewer_has_an_answer(run: Path) -> None:
    viewed = open_runs([run])[0]
    viewed.queries.refresh()
    api = Api([viewed])
    assert viewed.state()["problems"] == []
    assert api.answer("metrics", {})["steps"] == [0, *range(1, STEPS + 1)]
    assert api.answer("steps", {})["steps"] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        groups = api.answer("step", {"step": str(step)})["groups"]
        for number in range(len(groups)):
            group = api.answer("group", {"step": str(step), "group": str(number)})
            assert group["kept"]
            sample = api.answer("sample", {"step": str(step), "group": str(number), "sample": "0"})
            assert len(sample["entropies"]) == len(sample["tokens"]) > 0
    assert "problem" not in api.answer("buffer", {})
    assert api.answer("queries", {})["known"] > 0
    settings = api.answer("settings", {})
    values = {row["key"]: row["value"] for section in settings["sections"] for row in section["settings"]}
    assert values["rollout.group_size"] == 4
    assert values["task.difficulty"] == [3, 4, 5, 6, 7, 8]  # as the file has it, though no such setting is left


def test_its_checkpoint_can_be_evaluated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--samples", "2", "--out", str(tmp_path / "evaluation")]) == 0
    assert f"run step {STEPS}" in capsys.readouterr().out


def test_its_training_goes_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        newest = buffer.stats().newest_step
    assert main(["train", "--quiet", "--resume", str(run), f"train.steps={STEPS + 2}"]) == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    assert [line["step"] for line in read_metrics(run)] == list(range(STEPS + 3))
    with SampleBuffer.open_reader(run / "buffer.sqlite") as buffer:
        assert (newest, buffer.stats().newest_step) == (STEPS, STEPS + 2)
        assert buffer.check() == []
    assert [note.getMessage().count("\n") for note in caplog.records] == [0] * len(caplog.records)
    notes = json.loads((run / "run.json").read_text())["resumes"][0]
    assert (notes["step"], notes["settings"]) == (STEPS, {"train.steps": STEPS + 2})


def test_another_setting_is_refused_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, before := run.with_name("before"))
    assert main(["train", "--resume", str(run), "rollout.group_size=8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with other settings (rollout.group_size)" in line
    assert (run / "metrics.jsonl").read_bytes() == (before / "metrics.jsonl").read_bytes()
