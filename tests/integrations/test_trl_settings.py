"""What of TRL's settings acts on R3Trainer: DAPO's resampling, and what would silently be another experiment.

Covers r3.integrations.trl.config, r3.integrations.trl.grpo.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'r3-rl[trl]'")
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from r3.integrations.trl import R3Config, R3Trainer
from r3.integrations.trl.config import ELSEWHERE
from r3.integrations.trl.grpo import FurtherRows, by_rank
from r3.method.presets import METHODS
from tests.integrations import trl_tiny
from tests.integrations.test_trl import Watching, everything, launch
from tests.integrations.trl_tiny import OVERRIDES, correct, logged, losses, make, questions, settings
from tests.tokenizing import char_tokenizer
from tests.train.tiny import save_model

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


# What would silently be another experiment in TRL: refused or told, through `R3Trainer` itself.


def well_formed(completions: list[str], **_: Any) -> list[float]:
    """A reward of form: never above 0.4, and not the same for all."""
    return [0.4 * (len(completion) % 2) for completion in completions]


def trainer(folder: Path, rewards: Any, data: Dataset | None = None, **more: Any) -> Any:
    if not (folder / "model").exists():
        save_model(folder / "model")
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    config = R3Config(**settings(folder, **{"r3_overrides": OVERRIDES, **more}))
    rows = questions() if data is None else data
    return R3Trainer(str(folder / "model"), rewards, config, train_dataset=rows, processing_class=tokenizer)


def test_several_rewards_need_the_one_that_tells_right_from_wrong(tmp_path: Path) -> None:
    rewards = [well_formed, correct]  # form first, as is usual: by position no answer would ever be right
    with pytest.raises(ValueError, match=r"several reward functions \(well_formed, correct\).*r3_outcome_reward="):
        trainer(tmp_path, rewards)
    with pytest.raises(ValueError, match="'exact' is not among the reward functions: well_formed, correct"):
        trainer(tmp_path, rewards, r3_outcome_reward="exact")
    with pytest.raises(ValueError, match="two reward functions have the same name"):
        trainer(tmp_path, [correct, correct], r3_outcome_reward="correct")
    named = trainer(tmp_path, rewards, r3_outcome_reward="correct")
    named.train()
    assert sum(logged(named, "r3/replay/samples")) > 0
    trainer(tmp_path, rewards, r3_method="grpo", r3_overrides=None)  # TRL's own trainer needs none


def test_an_outcome_that_never_passes_is_told_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"none of \d+ answers in 10 batches was right.*'well_formed' gave 0 to 0\.4"):
        trainer(tmp_path, well_formed, num_train_epochs=6).train()


def test_nothing_is_told_where_answers_are_right_or_rewards_are_all_alike(tmp_path: Path) -> None:
    def never(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    for rewards in (correct, never):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer(tmp_path, rewards, num_train_epochs=6).train()
        assert not [w for w in told if "was right" in str(w.message)]


def test_a_cut_answer_never_outranks_a_wrong_one(tmp_path: Path) -> None:
    def plus_or_minus(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [2 * reward - 1 for reward in correct(completions, answer)]

    made = trainer(tmp_path, plus_or_minus, max_completion_length=4)
    made.train()
    samples = [sample for mixed in made.r3_step.groups for sample in mixed.group.samples]
    assert any(sample.truncated for sample in samples)
    assert all(sample.reward_parts["plus_or_minus"] <= 0 for sample in samples if sample.truncated)
    wrong_as_judged = {s.reward_parts["plus_or_minus"] for s in samples if not s.outcome and not s.truncated}
    assert wrong_as_judged <= {-1.0}
    assert -1.0 in {sample.reward_parts["plus_or_minus"] for sample in samples if sample.truncated}


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith(("r3", "grpo", "dapo"))])
def test_methods_that_trl_does_not_run_are_refused_by_name(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match="is a method of r3 train") as refusal:
        R3Config(**settings(tmp_path, r3_method=method))
    assert ELSEWHERE[method] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_overrides_without_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="advantage has no effect"):
        R3Config(**settings(tmp_path, r3_method="grpo", r3_overrides={"advantage.scale": "mean"}))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"advantage.homogeneous": "zvp"}, "advantage.homogeneous"),
        ({"replay.when": "always"}, "replay.when='always'"),
        ({"reflection.budget": "shared"}, "TRL's groups have one size"),
        ({"replay.ratio": "first_replayed"}, r"replay\.max_repeats"),
        ({"replay.mode": "replace"}, "are of r3 train alone"),
        ({"demonstration.enabled": True}, r"demonstration \(luffy\) trains on rows of the data"),
        ({"hint.enabled": True}, "ask again within a step, and TRL's step generates once"),
        ({"critique.enabled": True}, "ask again within a step, and TRL's step generates once"),
        ({"objective.correction": "recomputed"}, "objective.correction is TRL's to set"),
    ],
)
def test_remedies_that_trl_does_not_run_are_refused(tmp_path: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        R3Config(**settings(tmp_path, r3_overrides=overrides))


def test_rows_that_share_a_history(tmp_path: Path) -> None:
    row = {"prompt": "What is 1+1?", "answer": "10", "id": "a"}
    twice = Dataset.from_list([row, {**row, "answer": "90"}] * 4)
    with pytest.warns(UserWarning, match="4 rows have the prompt of another row and differ"):
        trainer(tmp_path, correct, twice.remove_columns("id"))
    other = Dataset.from_list([row, {**row, "prompt": "What is 2+2?"}] * 4)
    with pytest.raises(ValueError, match="two prompts have the id 'a'"):
        trainer(tmp_path, correct, other, r3_id_column="id")
