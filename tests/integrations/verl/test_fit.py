"""verl's own `fit`, on a local Ray and its own FSDP2 workers, with R³ in it: the mechanisms, the loss, exact resume.

Covers r3.integrations.verl.v0, r3.integrations.verl.v1, r3.integrations.verl.dataproto.
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
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig

from r3.buffer import SampleBuffer
from r3.integrations.common import FILE
from r3.method.mixed import StepResult
from r3.method.objective import ORIGINS, TokenBatch, policy_loss
from r3.method.replay import outcome_reward
from r3.method.settings import ObjectiveSettings
from r3.view.api import Api
from r3.view.runs import open_runs
from tests.integrations import contract
from tests.integrations.contract import Recording
from tests.integrations.verl import running
from tests.tokenizing import char_tokenizer
from tests.train.tiny import judge


@pytest.fixture(scope="module")
def whole() -> Path:
    return running.whole("v1")


@pytest.fixture(scope="module")
def v0() -> Path:
    """The same in verl's V0 trainer, stopped half-way and resumed."""
    return running.whole("v0")


OTHER = {
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "trainer.total_training_steps": 8,
    "+r3_method.reflection.train_as": "both",
    "+r3_method.max_reflections": 1,
    "+r3_method.query_key": "prompt",
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that learns, another loss, two updates per batch, answers under both prompts, no log-probs of engine's.

    Every second batch holds two queries twice.
    """
    folder = tmp_path_factory.mktemp("other")
    queries = contract.queries()
    again = [replace(queries[i], id=f"q{i} again") for i in (5, 6)]  # histories are kept by the prompt here
    running.prepare(folder, [*queries[:4], *queries[5:7], *again])
    done = running.run(folder, "v1", {"What is 1+1?": [0, 1, 2, 3], "What is 2+2?": [1]}, **OTHER)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for file in sorted(folder.glob("metrics-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            found[line["step"]] |= line["data"]
    found.pop(0, None)  # verl's validation before the first step
    return dict(found)


def updates(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The mini-batches of each step, those of both workers together."""
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("update-*.pkl")):
        step, number, _ = map(int, path.stem.split("-")[1:])
        part = pickle.loads(path.read_bytes())
        one = found[step].setdefault(number, {**part, "rows": []})
        one["rows"] += part["rows"]
    return found


def samples(path: Path) -> list[tuple[Any, ...]]:
    """All samples of a buffer by id, as comparable values."""
    with SampleBuffer.open_reader(path) as buffer:
        found = [one for _, one in sorted(buffer.find(range(1, 1000)).items())]
    return [
        (s.id, s.query_id, s.tokens.tobytes(), s.logprobs.tobytes(), s.outcome, s.step, s.reward, s.context.kind)
        for s in found
    ]


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


@pytest.mark.parametrize("name", ["whole", "v0"])
def test_all_three_mechanisms_fire_and_are_logged(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    logged = metrics(folder)
    assert list(logged) == list(range(1, 9))
    for metric in ("replay/samples", "groups/reflection", "ranking/samples", "replay/cross_context"):
        assert sum(step[f"r3_method/{metric}"] for step in logged.values()) > 0, metric
    # Reflection groups of a step are taken in that step, none is left to the next.
    for number, result in running.steps(folder).items():
        assert {s.step for mixed in result.groups for s in mixed.group.samples} == {number}
        assert logged[number]["r3_method/groups"] == len(result.groups)


@pytest.mark.parametrize("name", ["whole", "v0"])
def test_the_run_opens_in_the_viewer(name: str, request: pytest.FixtureRequest) -> None:
    """Its record agrees with what verl logged, and every page has an answer."""
    folder = request.getfixturevalue(name)
    run = open_runs([folder / "checkpoints"])[0]
    api = Api([run])
    columns = api.answer("metrics", {})["columns"]
    logged = metrics(folder)
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


@pytest.mark.parametrize("name", ["whole", "v0"])
def test_past_samples_stay_out_of_verls_statistics_of_answers(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    logged = metrics(folder)
    for number, result in running.steps(folder).items():
        lengths, rewards = [len(s) for s in result.samples], [outcome_reward(s) for s in result.samples]
        assert logged[number]["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert logged[number]["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards))


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


@pytest.mark.parametrize("name", ["whole", "other", "v0"])
def test_the_number_of_updates_stays_though_the_batch_grows(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    expected = {"whole": 1, "other": 2, "v0": 1}[name]
    grown = 0
    for parts in updates(folder).values():
        assert len(parts) == expected
        sizes = {part["mini_batch_size"] for part in parts.values()}
        assert [len(part["rows"]) for part in parts.values()] == [*sizes] * expected
        grown += min(sizes) > contract.BATCH * contract.GROUP // expected
    assert grown > 0


@pytest.mark.parametrize("name", ["whole", "other", "v0"])
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


@pytest.mark.parametrize("name", ["whole", "v0"])
def test_the_loss_that_verls_workers_had_is_the_methods(name: str, request: pytest.FixtureRequest) -> None:
    """With a policy that stands still, the loss of the one update is that of `r3.method.objective`."""
    folder = request.getfixturevalue(name)
    for number, parts in updates(folder).items():
        assert parts[0]["loss"] == pytest.approx(
            methods_loss(running.steps(folder)[number], parts[0]["rows"]), abs=1e-6
        )


def test_verls_loss_over_two_updates_is_the_methods(other: Path) -> None:
    """Were the policy to stand still from one to the next, which it does not: that of the first is as verl had it."""
    for number, parts in updates(other).items():
        losses = [verls_loss(part, "seq-mean-token-mean") for part in parts.values()]
        assert parts[0]["loss"] == pytest.approx(losses[0], abs=1e-6)
        rows = [row for part in parts.values() for row in part["rows"]]
        assert sum(losses) / 2 == pytest.approx(methods_loss(running.steps(other)[number], rows), abs=1e-6)


@pytest.mark.parametrize("name", ["other", "v0"])
def test_rows_pass_through_the_weights_that_the_server_got(name: str, request: pytest.FixtureRequest) -> None:
    """The log-probs that verl's sharded workers had for every row, by a plain model with the weights they sent off."""
    folder = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sent = {number: torch.load(folder / f"weights-{number}.pt") for number in range(8)}
    moved = max(float((sent[7][key] - sent[0][key]).abs().max()) for key in sent[0])
    assert moved > 1e-3 if name == "other" else moved < 1e-6
    for number, parts in updates(folder).items():
        model.load_state_dict(sent[number - 1])
        for row in (row for part in parts.values() for row in part["rows"]):
            ids, length = torch.tensor([row["prompts"] + row["responses"]]), len(row["responses"])
            with torch.no_grad():
                log_TV = model(ids).logits[0].log_softmax(-1)[-length - 1 : -1]
            expected = log_TV.gather(1, ids[0, -length:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row["old_log_probs"]), expected, rtol=0, atol=1e-4)


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


def test_resume_is_exact(other: Path, tmp_path: Path) -> None:
    """The step after the checkpoint, with FSDP2's weights and AdamW's state from it: bit for bit that of the whole run.

    One step alone: the next holds two queries twice, whose recorded answers go by which of the two asked first.
    """
    shutil.copytree(other / "model", tmp_path / "model")
    for name in ("train.parquet", "asked-4.json"):
        shutil.copy(other / name, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(other / "checkpoints/global_step_4", checkpoints / "global_step_4")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    done = running.run(tmp_path, "v1", **{**OTHER, "trainer.total_training_steps": 5})
    assert done.returncode == 0, done.stderr[-4000:]
    expected, found = running.steps(other), running.steps(tmp_path)
    assert list(found) == [5]
    assert seen(found[5]) == seen(expected[5])
    assert found[5].counts == expected[5].counts
    ours = samples(checkpoints / "global_step_5" / FILE)
    assert ours == [one for one in samples(other / "checkpoints/global_step_8" / FILE) if one[5] <= 5]
    assert len(ours) > len(samples(other / "checkpoints/global_step_4" / FILE))
    weights, uninterrupted = (torch.load(folder / "weights-5.pt") for folder in (tmp_path, other))
    assert all(torch.equal(weights[key], uninterrupted[key]) for key in uninterrupted)


def test_both_trainers_fill_the_same_buffer(whole: Path, v0: Path) -> None:
    """V0's though it was stopped half-way; the contract's test holds what they decide against our own loop."""
    last = Path("checkpoints/global_step_8") / FILE
    assert samples(v0 / last) == samples(whole / last)
