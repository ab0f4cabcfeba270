"""What would silently be another experiment in TRL: refused or told, through `R3Trainer` itself.

Covers r3.integrations.trl.config.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from r3.integrations.trl import R3Config, R3Trainer
from r3.integrations.trl.config import ELSEWHERE
from r3.method.presets import METHODS
from tests.integrations.trl_tiny import OVERRIDES, correct, logged, questions, settings
from tests.tokenizing import char_tokenizer
from tests.train.tiny import save_model

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own deprecations are theirs


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
