"""verl's own `fit`, on a local Ray, with the plugin in it: all three mechanisms, the loss, exact resume.

Covers r3.integrations.verl.trainer.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig

from r3.buffer import SampleBuffer
from r3.integrations.common.buffer_copies import FILE
from r3.method.mixed import StepResult
from r3.method.objective import ORIGINS, TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.integrations import contract
from tests.integrations.verl import running


@pytest.fixture(scope="module")
def whole() -> Path:
    return running.whole()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another loss, two updates per batch, reflection answers under both prompts, no log-probs of the engine's.

    Every second batch holds two queries twice.
    """
    folder = tmp_path_factory.mktemp("other")
    queries = contract.queries()
    again = [replace(queries[i], id=f"q{i} again") for i in (5, 6)]  # histories are kept by the prompt here
    running.prepare(folder, [*queries[:4], *queries[5:7], *again])
    done = running.run(
        folder,
        {"What is 1+1?": [0, 1, 2, 3], "What is 2+2?": [1]},
        actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean",
        actor_rollout_ref__actor__ppo_mini_batch_size=2,
        actor_rollout_ref__rollout__calculate_log_probs=False,
        trainer__total_training_steps=8,
        trainer__save_freq=-1,
        **{"+r3_method.reflection.train_as": "both", "+r3_method.max_reflections": 1, "+r3_method.query_key": "prompt"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def updates(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The mini-batches of each step, those of both workers together."""
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("update-*.pkl")):
        step, number, _ = map(int, path.stem.split("-")[1:])
        part = pickle.loads(path.read_bytes())
        one = found[step].setdefault(number, {"mini_batch_size": part["mini_batch_size"], "rows": []})
        one["rows"] += part["rows"]
    return found


def everything(path: Path) -> list[tuple[Any, ...]]:
    """All samples of a buffer, as comparable values."""
    with SampleBuffer.open_reader(path) as buffer:
        found = [s for own in buffer.history([q.id for q in contract.queries()]).values() for s in own]
    return sorted(
        (s.id, s.query_id, s.tokens.tobytes(), s.logprobs.tobytes(), s.outcome, s.reward, s.step, s.context.kind)
        for s in found
    )


def seen(result: StepResult) -> list[Any]:
    """What was decided, as comparable values."""
    return [
        (
            mixed.group.query.id,
            mixed.group.context,
            [member.sample.tokens.tolist() for member in mixed.members],
            mixed.rewards,
            mixed.advantages,
            mixed.ranked,
        )
        for mixed in result.groups
    ]


def test_all_three_mechanisms_fire_and_are_logged(whole: Path) -> None:
    logged = metrics(whole)
    assert list(logged) == list(range(1, 9))
    for name in ("replay/samples", "groups/reflection", "ranking/samples", "replay/cross_context"):
        assert sum(step[f"r3_method/{name}"] for step in logged.values()) > 0, name
    # Reflection groups of a step are taken in that step, none is left to the next.
    for number, result in running.steps(whole).items():
        assert {s.step for mixed in result.groups for s in mixed.group.samples} == {number}
        assert logged[number]["r3_method/groups"] == len(result.groups)


def test_the_run_opens_in_the_viewer(whole: Path) -> None:
    """Its record agrees with what verl logged, and every page has an answer."""
    run = open_runs([whole / "checkpoints"])[0]
    api = Api([run])
    columns = api.answer("metrics", {})["columns"]
    logged = metrics(whole)
    assert run.metrics.steps == list(logged)
    for name in ("groups/plain", "replay/samples", "ranking/samples", "reflection/built"):
        assert columns[name] == [step[f"r3_method/{name}"] for step in logged.values()], name
    assert run.state()["status"] == "finished"
    for number, result in running.steps(whole).items():
        groups = api.answer("step", {"step": str(number)})["groups"]
        assert [group["query"] for group in groups] == [mixed.group.query.id for mixed in result.groups]
        assert api.answer("group", {"step": str(number), "group": "0"})["samples"]
    assert api.answer("buffer", {})["stats"]["samples"] > 0
    keys = {row["key"] for section in api.answer("settings", {})["sections"] for row in section["settings"]}
    assert {"method.name", "verl.data.train_batch_size"} <= keys


def test_past_samples_stay_out_of_verls_statistics_of_answers(whole: Path) -> None:
    for number, result in running.steps(whole).items():
        lengths = [len(sample) for sample in result.samples]
        assert metrics(whole)[number]["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_failed_rollouts_leave_the_batch_and_the_run_goes_on(other: Path) -> None:
    groups = {m.group.query.prompt[0].content: m.group for m in running.steps(other)[3].groups}
    assert "What is 1+1?" not in groups
    assert len(groups["What is 2+2?"]) == contract.GROUP - 1
    assert metrics(other)[3]["r3_method/groups/failed"] > 0
    assert list(running.steps(other)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_past_sample_joins_both_groups_of_a_query_that_a_batch_holds_twice(other: Path) -> None:
    """And is in the update as often, which the tests below see."""
    shared = 0
    for result in running.steps(other).values():
        joined = [sample.id for mixed in result.groups for sample in mixed.replayed]
        shared += len(joined) - len(set(joined))
    assert shared > 0


@pytest.mark.parametrize("name", ["whole", "other"])
def test_the_number_of_updates_stays_though_the_batch_grows(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    expected = {"whole": 1, "other": 2}[name]
    grown = 0
    for parts in updates(folder).values():
        assert len(parts) == expected
        sizes = {part["mini_batch_size"] for part in parts.values()}
        assert [len(part["rows"]) for part in parts.values()] == [*sizes] * expected
        grown += min(sizes) > contract.BATCH * contract.GROUP // expected
    assert grown > 0


@pytest.mark.parametrize("name", ["whole", "other"])
def test_every_member_of_a_mixed_group_is_trained_once(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    for number, parts in updates(folder).items():
        trained = [
            (row["prompts"], row["responses"])
            for part in parts.values()
            for row in part["rows"]
            if any(row["advantages"]) and any(row["response_mask"])
        ]
        for weighted in running.steps(folder)[number].weighted:
            key = (weighted.prompt.tolist(), weighted.sample.tokens.tolist())
            if key in trained:
                trained.remove(key)
            else:
                assert weighted.origin == "replayed"  # gated to silence, token by token
        assert not trained


@pytest.mark.parametrize(("name", "normalise"), [("whole", "token-mean"), ("other", "seq-mean-token-mean")])
def test_verls_loss_is_the_methods(name: str, normalise: str, request: pytest.FixtureRequest) -> None:
    """With a policy that stands still, verl's loss over the rows it was given is the loss of `r3.method.objective`."""
    folder = request.getfixturevalue(name)
    for number, parts in updates(folder).items():
        found = sum(verls_loss(part, normalise) for part in parts.values()) / len(parts)
        rows = [row for part in parts.values() for row in part["rows"]]
        tolerance = 0.2 if normalise == "token-mean" and len(parts) > 1 else 1e-6
        assert found == pytest.approx(methods_loss(running.steps(folder)[number], rows), abs=tolerance)


def verls_loss(part: dict[str, Any], normalise: str) -> float:
    """verl's own loss function over a mini-batch, log-probs being the old ones: every ratio is 1."""
    columns = {
        name: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in part["rows"]], batch_first=True)
        for name in ("old_log_probs", "advantages", "response_mask")
    }
    config = FSDPActorConfig(rollout_n=contract.GROUP, ppo_micro_batch_size_per_gpu=4, strategy="fsdp")
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(columns["response_mask"].sum()),
        global_batch_size=part["mini_batch_size"],
        loss_scale_factor=None,
    )
    loss, _ = compute_policy_loss_vanilla(
        old_log_prob=columns["old_log_probs"],
        log_prob=columns["old_log_probs"],
        advantages=columns["advantages"],
        response_mask=columns["response_mask"],
        loss_agg_mode=normalise,
        config=config,
    )
    return float(loss)


def methods_loss(result: StepResult, rows: list[dict[str, Any]]) -> float:
    """The same by r3's objective, from what was decided and the log-probs that verl computed."""
    proximal = {(tuple(r["prompts"]), tuple(r["responses"])): torch.tensor(r["old_log_probs"]) for r in rows}
    weighted = result.weighted
    old = [proximal[tuple(w.prompt.tolist()), tuple(w.sample.tokens.tolist())] for w in weighted]
    drawn = [
        torch.tensor(w.sample.logprobs) if w.origin == "replayed" else old[i] for i, w in enumerate(weighted)
    ]  # π_prox is π_behave for fresh samples; verl has its own correction for its engines' differences
    batch = TokenBatch(
        sequence_T=torch.cat([torch.full((len(o),), i) for i, o in enumerate(old)]),
        behaviour_T=torch.cat(drawn),
        advantage_T=torch.cat([torch.from_numpy(w.advantage_T) for w in weighted]),
        weight_S=torch.tensor([w.weight for w in weighted]),
        origin_S=torch.tensor([ORIGINS.index(w.origin) for w in weighted]),
        other_context_S=torch.tensor([w.other_context for w in weighted]),
        proximal_T=torch.cat(old),
    )
    return float(policy_loss(torch.cat(old), batch, ObjectiveSettings()).loss)


def test_resume_is_exact(whole: Path, tmp_path: Path) -> None:
    """From the fourth of eight steps: the same decisions, and in the end the same buffer."""
    shutil.copytree(whole / "model", tmp_path / "model")
    shutil.copy(whole / "train.parquet", tmp_path)
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(whole / "checkpoints/global_step_4", checkpoints / "global_step_4")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    done = running.run(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    expected, found = running.steps(whole), running.steps(tmp_path)
    assert list(found) == [5, 6, 7, 8]
    for number, result in found.items():
        assert seen(result) == seen(expected[number])
        assert result.counts == expected[number].counts
    last = Path("checkpoints/global_step_8") / FILE
    assert everything(tmp_path / last) == everything(whole / last)
    assert everything(tmp_path / last) != everything(whole / "checkpoints/global_step_4" / FILE)
