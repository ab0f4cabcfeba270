"""Self-distillation in a run: the teacher's passes are counted, and it is the policy itself under another prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3.cli import main
from r3.config import TrainSettings
from r3.method.settings import ObjectiveSettings
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory
from r3.policy.update import Updater
from tests.policy.test_update import policy_of
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, read_metrics


def test_answers_are_taught_and_the_passes_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Trajectory] = []
    original = Updater.logprobs

    def spy(self: Updater, sequences: Sequence[Trajectory]) -> Any:
        asked.extend(sequences)
        return original(self, sequences)

    monkeypatch.setattr(Updater, "logprobs", spy)
    settings = overrides(tmp_path, method="sdpo", reward__length_bonus="auto", train__steps=4)
    assert main(["train", "--quiet", *settings, "method.distill.template='{question}|{attempt}|'"]) == 0
    lines = read_metrics(tmp_path / "run")[1:]
    taught = [sum(line[f"distill/{shown}"] for shown in ("success", "history", "feedback")) for line in lines]
    assert [line["forwards/extra"] for line in lines] == taught
    assert sum(taught) == len(asked) > 0
    assert sum(line["distill/history"] for line in lines) > 0
    assert lines[0]["distill/history"] == 0
    assert all(line["update/grad_norm"] > 0 for line, count in zip(lines, taught, strict=True) if count)


def test_the_teacher_is_the_policy_under_another_prompt(tmp_path: Path) -> None:
    """Against the model's own forward, one sequence at a time."""
    policy, rng = policy_of(tmp_path), np.random.default_rng(0)
    sequences = [Trajectory(rng.integers(3, 60, n).astype(np.int32), rng.integers(3, 60, m).astype(np.int32))
                 for n, m in [(5, 3), (2, 7), (9, 1)]]  # fmt: skip
    settings = TrainSettings()
    updater = Updater(policy, Optimiser(policy.model.parameters(), settings, 3), ObjectiveSettings(), settings, 0.7)
    for sequence, found in zip(sequences, updater.logprobs(sequences), strict=True):
        ids = torch.tensor([*sequence.prompt.tolist(), *sequence.response.tolist()])
        logs = (policy.base(input_ids=ids.unsqueeze(0)).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = logs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)[len(sequence.prompt) - 1 :]
        assert np.allclose(found, expected.detach().numpy(), atol=1e-5)


def test_a_teachers_prompt_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overrides(tmp_path, method="sdpo", reward__length_bonus="auto", method__distill__max_prompt_tokens=250)
    assert "method.distill.max_prompt_tokens=250 and rollout.max_tokens=" in refused(capsys, "train", *settings)
