"""verl's own `fit`, on a local Ray and its own FSDP2 workers, with R³ in it: the mechanisms, the loss, the contract.

Covers r3.integrations.verl.v0, r3.integrations.verl.v1.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3.integrations.common import BUFFER_FILE
from r3.method.mixed import StepResult
from r3.method.replay import outcome_reward
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.integrations import contract
from tests.integrations.contract import Recording
from tests.integrations.verl import running
from tests.tokenizing import char_tokenizer
from tests.train.tiny import judge


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of eight steps."""
    folder = tmp_path_factory.mktemp("v1")
    running.prepare(folder)
    done = running.run(folder, "v1", trainer__total_training_steps=8)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def v0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in verl's V0 trainer, stopped half-way and resumed."""
    folder = tmp_path_factory.mktemp("v0")
    running.prepare(folder)
    for until in (4, 8):
        done = running.run(folder, "v0", trainer__total_training_steps=until, trainer__val_before_train=True)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(params=["v1", "v0"])
def folder(request: pytest.FixtureRequest) -> Path:
    """The folder of each of the two runs."""
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[StepResult]:
    """What our own loop decides about the same recording."""
    return contract.run_loop(tmp_path_factory.mktemp("ours"))


def test_the_contract_holds(folder: Path, ours: list[StepResult]) -> None:
    """Recorded rollouts give the same mixed groups and advantages as in our loop, to 1e-6."""
    contract.agree(list(running.steps(folder).values()), ours)


def test_all_three_mechanisms_fire_and_are_logged(folder: Path) -> None:
    logged = running.metrics(folder)
    assert list(logged) == list(range(1, 9))
    for metric in ("replay/samples", "groups/reflection", "ranking/samples", "replay/cross_context"):
        assert sum(step[f"r3_method/{metric}"] for step in logged.values()) > 0, metric
    # Reflection groups of a step are taken in that step, none is left to the next.
    for number, result in running.steps(folder).items():
        assert {s.step for mixed in result.groups for s in mixed.group.samples} == {number}
        assert logged[number]["r3_method/groups"] == len(result.groups)


def test_the_run_opens_in_the_viewer(folder: Path) -> None:
    """Its record agrees with what verl logged, and every page has an answer."""
    run = open_runs([folder / "checkpoints"])[0]
    api = Api([run])
    columns = api.answer("metrics", {})["columns"]
    logged = running.metrics(folder)
    assert run.metrics.steps == list(logged)
    for metric in ("groups/plain", "replay/samples", "ranking/samples", "reflection/built"):
        assert columns[metric] == [step.get(f"r3_method/{metric}") for step in logged.values()], metric
    norms = [step["actor/grad_norm"] for step in logged.values()]
    assert columns["update/grad_norm"] == pytest.approx(norms, abs=1e-4)  # as many digits as it keeps
    assert run.state()["status"] == "finished"
    for number, result in running.steps(folder).items():
        groups = api.answer("step", {"step": str(number)})["groups"]
        assert [group["query"] for group in groups] == [mixed.group.query.id for mixed in result.groups]
        assert api.answer("group", {"step": str(number), "group": "0"})["samples"]
    assert api.answer("buffer", {})["stats"]["samples"] > 0
    keys = {row["key"] for section in api.answer("settings", {})["sections"] for row in section["settings"]}
    assert {"method.name", "verl.data.train_batch_size"} <= keys


def test_verls_validation_asks_no_reflection_prompts(v0: Path) -> None:
    """It goes through the same stage as a step's batch: before the first step, and again where the run was resumed."""
    lines = [json.loads(file.read_text().splitlines()[0]) for file in sorted(v0.glob("metrics-*.jsonl"))]
    assert [line["step"] for line in lines] == [0, 4]
    first = [(Recording.nth(query.prompt, 1)[0], query.answer) for query in contract.queries()]
    right = [not one.truncated and judge(char_tokenizer().decode(one.tokens), answer) for one, answer in first]
    for line in lines:
        assert line["data"]["val-core/contract/acc/mean@1"] == pytest.approx(sum(right) / len(right))


def test_past_samples_stay_out_of_verls_statistics_of_answers(folder: Path) -> None:
    logged = running.metrics(folder)
    for number, result in running.steps(folder).items():
        lengths, rewards = [len(s) for s in result.samples], [outcome_reward(s) for s in result.samples]
        assert logged[number]["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert logged[number]["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_a_batch_that_grows_is_trained_whole_in_one_update(folder: Path) -> None:
    running.check_number_of_updates(folder, expected=1)
    running.check_members(folder)


def test_the_loss_that_verls_workers_had_is_the_methods(folder: Path) -> None:
    """With a policy that stands still, the loss of the one update is that of `r3.method.objective`."""
    for number, parts in running.updates(folder).items():
        assert parts[0]["loss"] == pytest.approx(
            running.methods_loss(running.steps(folder)[number], parts[0]["rows"]), abs=1e-6
        )


def test_rows_pass_through_the_weights_that_the_server_got(v0: Path) -> None:
    """In V1 too, by test_learning.py."""
    running.check_log_probs(v0)
    assert running.moved(v0) < 1e-6


def test_both_trainers_fill_the_same_buffer(v1: Path, v0: Path) -> None:
    """V0's though it was stopped half-way; the contract's test holds what they decide against our own loop."""
    last = Path("checkpoints/global_step_8") / BUFFER_FILE
    assert running.samples(v0 / last) == running.samples(v1 / last)
