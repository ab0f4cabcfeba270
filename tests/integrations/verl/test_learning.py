"""verl's V1 trainer on a policy that learns: another loss, two updates per batch, failed rollouts, exact resume.

Covers r3.integrations.verl.v1.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig

from r3.integrations.common import BUFFER_FILE
from r3.method.mixed import StepResult
from tests.integrations import contract
from tests.integrations.verl import running

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


def test_failed_rollouts_leave_the_batch_and_the_run_goes_on(other: Path) -> None:
    groups = {m.group.query.prompt[0].content: m.group for m in running.steps(other)[3].groups}
    assert "What is 1+1?" not in groups
    assert len(groups["What is 2+2?"]) == contract.GROUP - 1
    assert running.metrics(other)[3]["r3_method/groups/failed"] > 0
    assert list(running.steps(other)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_past_sample_joins_both_groups_of_a_query_that_a_batch_holds_twice(other: Path) -> None:
    """And is in the update as often, which the tests below see."""
    shared = 0
    for result in running.steps(other).values():
        joined = [sample.id for mixed in result.groups for sample in mixed.replayed]
        shared += len(joined) - len(set(joined))
    assert shared > 0


def test_a_batch_that_grows_is_trained_whole_in_as_many_updates(other: Path) -> None:
    running.check_number_of_updates(other, expected=2)
    running.check_members(other)


def test_verls_loss_over_two_updates_is_the_methods(other: Path) -> None:
    """Were the policy to stand still from one to the next, which it does not: that of the first is as verl had it."""
    for number, parts in running.updates(other).items():
        losses = [verls_loss(part, "seq-mean-token-mean") for part in parts.values()]
        assert parts[0]["loss"] == pytest.approx(losses[0], abs=1e-6)
        rows = [row for part in parts.values() for row in part["rows"]]
        assert sum(losses) / 2 == pytest.approx(running.methods_loss(running.steps(other)[number], rows), abs=1e-6)


def test_rows_pass_through_the_weights_that_the_server_got(other: Path) -> None:
    running.check_log_probs(other)
    assert running.moved(other) > 1e-3


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
    ours = running.samples(checkpoints / "global_step_5" / BUFFER_FILE)
    assert ours == [one for one in running.samples(other / "checkpoints/global_step_8" / BUFFER_FILE) if one[5] <= 5]
    assert len(ours) > len(running.samples(other / "checkpoints/global_step_4" / BUFFER_FILE))
    weights, uninterrupted = (torch.load(folder / "weights-5.pt") for folder in (tmp_path, other))
    assert all(torch.equal(weights[key], uninterrupted[key]) for key in uninterrupted)


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
