"""DAPO's resampling inside TRL: `R3Trainer.train()` with `r3_method="dapo"`, in one process and in two.

Covers r3.integrations.trl.dataset.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from r3.integrations.trl import R3Trainer
from r3.integrations.trl.dataset import FurtherRows, by_rank
from tests.integrations import trl_tiny
from tests.integrations.test_trl import Watching, everything, launch
from tests.integrations.trl_tiny import logged, losses, make

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs

DAPO: dict[str, Any] = {
    "r3_method": "dapo",
    "r3_overrides": {"resample.max_rounds": 2},
    "loss_type": "dapo",
    "epsilon_high": 0.28,
}


class Asking(Watching):
    """Keeps which prompts TRL was asked to answer, call by call."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.asked: list[list[str]] = []

    def _calculate_rewards(self, inputs: Any, prompts: Any, *others: Any) -> Any:
        self.asked.append([row["prompt"] for row in inputs])
        return super()._calculate_rewards(inputs, prompts, *others)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run of DAPO with checkpoints."""
    folder = tmp_path_factory.mktemp("dapo")
    trainer = make(folder, Asking, save_strategy="steps", save_steps=2, **DAPO)
    trainer.train()
    return folder, trainer


def test_groups_without_variance_are_replaced_and_not_trained_on(run: Any) -> None:
    """Oracle: the outcomes of the groups themselves, in the order in which TRL was asked."""
    _, trainer = run
    asked = iter(trainer.asked)
    drew_again = 0
    for result, rounds in zip(trainer.steps, logged(trainer, "r3/resample/rounds"), strict=True):
        groups = [mixed.group for mixed in result.groups]
        mixed = [0 < sum(sample.outcome for sample in group.samples) < len(group) for group in groups]
        first = 0
        for number in range(int(rounds) + 1):
            prompts = next(asked)[::4]
            assert prompts == [group.query.prompt for group in groups[first : first + len(prompts)]]
            assert len(prompts) == 4 - sum(mixed[:first])  # the batch's four, then one for each that is missing
            first += len(prompts)
            drew_again += number > 0
        assert first == len(groups)
        assert sum(mixed) == 4 or rounds == 2
        assert all(mixed[weighted.group] for weighted in result.weighted)
    assert next(asked, None) is None
    assert drew_again > 2


def test_the_loss_is_the_token_mean_of_the_groups_kept(tmp_path: Path) -> None:
    """With a policy that stands still every ratio is 1, and the loss is the mean of −advantage over kept tokens."""
    trainer = make(tmp_path, Watching, learning_rate=1e-12, **DAPO)
    trainer.train()
    for batch, result, loss in zip(trainer.batches, trainer.steps, losses(trainer), strict=True):
        kept = [
            (sample, float(sample.reward))
            for group in (mixed.group for mixed in result.groups)
            if len({sample.outcome for sample in group.samples}) == 2
            for sample in group.samples
        ]
        by_hand = 0.0
        for i in range(0, len(kept), 4):
            rewards = [reward for _, reward in kept[i : i + 4]]
            mean = sum(rewards) / 4
            std = (sum((reward - mean) ** 2 for reward in rewards) / 4) ** 0.5
            by_hand -= sum(len(s) * (reward - mean) / (std + 1e-6) for s, reward in kept[i : i + 4])
        tokens = sum(len(sample) for sample, _ in kept)
        assert loss == pytest.approx(by_hand / max(1, tokens), abs=2e-5)
        assert len(batch["prompt_ids"]) % 2 == 0


def test_trls_counters_stay(run: Any) -> None:
    """Steps and epochs are TRL's, tokens are all that were generated."""
    _, trainer = run
    assert trainer.state.global_step == 6
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry] == [0.5, 1, 1.5, 2, 2.5, 3]
    answered = [
        sum(len(mixed.group.prompt) + len(sample) for mixed in result.groups for sample in mixed.group.samples)
        for result in trainer.steps
    ]
    assert logged(trainer, "num_tokens") == list(itertools.accumulate(answered))


def test_a_resumed_run_is_the_uninterrupted_one(run: Any) -> None:
    folder, whole = run
    assert json.loads((folder / "out/checkpoint-2/r3_resampling.json").read_text())["position"] > 0
    (folder / "again").mkdir()
    os.symlink(folder / "model", folder / "again" / "model")
    resumed = make(folder / "again", Asking, save_strategy="steps", save_steps=2, **DAPO)
    resumed.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert resumed.asked == whole.asked[-len(resumed.asked) :]
    assert everything(folder / "again/out/r3_buffer.sqlite") == everything(folder / "out/r3_buffer.sqlite")


def test_all_of_r3_with_resampling(tmp_path: Path) -> None:
    overrides = {**trl_tiny.OVERRIDES, "resample": "on"}
    trainer = make(tmp_path, Watching, r3_overrides=overrides)
    trainer.train()
    assert sum(logged(trainer, "r3/resample/rounds")) > 0
    assert sum(logged(trainer, "r3/replay/samples")) > 0
    assert sum(logged(trainer, "r3/groups/reflection")) > 0


def test_two_processes_and_a_resume(tmp_path: Path) -> None:
    # Three answers a question: groups lie across the ranks, and further queries come two by two.
    more = {"per_device_train_batch_size": 3, "num_generations": 3, "save_strategy": "steps", "save_steps": 4, **DAPO}
    apart = {**more, "r3_buffer_path": str(tmp_path / "resumed.sqlite")}
    whole, resumed = launch(tmp_path, (more, None), (apart, str(tmp_path / "out/checkpoint-4")))
    assert sum(entry["r3/resample/rounds"] for entry in whole) > 0
    assert all(entry["r3/rows"] % 4 == 0 for entry in whole)
    assert [entry["loss"] for entry in resumed] == [entry["loss"] for entry in whole]
    assert everything(tmp_path / "resumed.sqlite") == everything(tmp_path / "out/r3_buffer.sqlite")


def test_a_stream_cannot_be_asked_for_further_rows(tmp_path: Path) -> None:
    stream = trl_tiny.questions().to_iterable_dataset()
    with pytest.raises(ValueError, match="give a dataset, not a stream"):
        make(tmp_path, R3Trainer, data=stream, max_steps=2, **DAPO)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_hold_each_rounds_share_one_after_the_other(shares: list[int], ranks: int) -> None:
    """Oracle: deal labelled rows round by round, and read off what each rank holds."""
    labels = iter(range(10_000))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for share in shares:
        for rank in range(ranks):
            held[rank] += [next(labels) for _ in range(share)]
    assert by_rank([share * ranks for share in shares], ranks) == [label for rows in held for label in rows]


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_further_rows_depend_on_the_position_alone(size: int, counts: list[int], shuffle: bool) -> None:
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(size)])
    in_parts, at_once = (FurtherRows(rows, seed=5, shuffle=shuffle) for _ in range(2))
    taken = [row for count in counts for row in in_parts.take(count)]
    assert taken == at_once.take(sum(counts))
    for first in range(0, len(taken) - size + 1, size):  # every pass has every row once
        assert sorted(row["prompt"] for row in taken[first : first + size]) == sorted(map(str, range(size)))
