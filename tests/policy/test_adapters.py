"""`model.path=` a folder of LoRA adapters: training goes on with them or with the merged model, never the bare base.

Covers r3.policy.source, r3.policy.model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from r3.cli import main
from r3.policy import ModelSettings
from r3.policy.model import Policy
from r3.policy.source import quiet
from tests.train.test_bad_input import refused
from tests.train.tiny import overrides, read_metrics

LORA = {"model__lora__enabled": "true", "model__lora__rank": 4}
IDS = torch.arange(3, 40).unsqueeze(0)


def train(folder: Path, **more: Any) -> list[dict[str, Any]]:
    assert main(["train", "--quiet", *overrides(folder, **{"train__steps": 2, **more})]) == 0
    return read_metrics(folder / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run with strong steps; its model, its task, and its adapters beside them."""
    folder = tmp_path_factory.mktemp("lora")
    train(folder, **LORA, train__learning_rate="3e-2", method="grpo")
    shutil.copytree(folder / "run" / "checkpoints" / "step-000002" / "policy", folder / "adapters")
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.eval()
    return model(IDS).logits


def from_folder(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def theirs(trained: Path) -> torch.Tensor:
    """By peft alone."""
    return logits(peft_of(trained, trained / "adapters"))


def peft_of(trained: Path, adapters: Path) -> Any:
    with quiet():
        return PeftModel.from_pretrained(from_folder(trained / "model"), str(adapters))


@pytest.mark.parametrize("lora", [True, False])
def test_the_policy_is_that_of_the_adapters(trained: Path, lora: bool) -> None:
    settings = {"path": str(trained / "adapters"), "device": "cpu", "lora": {"enabled": lora, "rank": 4}}
    policy = Policy.load(ModelSettings.model_validate(settings))
    assert torch.allclose(logits(policy.base), theirs(trained), atol=1e-5)
    assert not torch.allclose(logits(policy.base), logits(from_folder(trained / "model")), atol=1e-2)
    trains = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trains) is lora
    assert trains


@pytest.mark.parametrize("lora", [True, False])
def test_training_goes_on_from_them_and_says_so(
    trained: Path, tmp_path: Path, lora: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A step so small that it moves nothing: what it leaves is what it began with."""
    shutil.copy(trained / "task.jsonl", tmp_path)
    more = {**LORA, "model__lora__enabled": str(lora).lower(), "train__learning_rate": "1e-12", "train__steps": 1}
    train(tmp_path, model__path=trained / "adapters", **more)
    said = [record.message for record in caplog.records if "LoRA adapters (rank 4)" in record.message]
    assert len(said) == 1
    assert ("going on with its" if lora else "are merged into the base") in said[0]
    left = tmp_path / "run" / "checkpoints" / "step-000001" / "policy"
    assert (left / "adapter_model.safetensors").exists() is lora
    model = peft_of(trained, left) if lora else from_folder(left)
    assert torch.allclose(logits(model), theirs(trained), atol=1e-5)


def test_a_resumed_run_goes_on_with_its_own_adapters(trained: Path, tmp_path: Path) -> None:
    runs = []
    for name, steps in (("whole", 3), ("parts", 1)):
        (tmp_path / name).mkdir()
        shutil.copy(trained / "task.jsonl", tmp_path / name)
        runs.append(train(tmp_path / name, model__path=trained / "adapters", **LORA, train__steps=steps))
    assert main(["train", "--quiet", "--resume", str(tmp_path / "parts" / "run"), "train.steps=3"]) == 0
    resumed = read_metrics(tmp_path / "parts" / "run")
    assert [line["update/loss"] for line in resumed[1:]] == [line["update/loss"] for line in runs[0][1:]]


def test_merging_writes_a_whole_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = tmp_path / "merged"
    assert main(["models", "merge", str(trained / "adapters"), "--to", str(merged)]) == 0
    assert f"LoRA adapters (rank 4) of {trained / 'model'}" in capsys.readouterr().out
    assert not (merged / "adapter_config.json").exists()
    assert torch.allclose(logits(from_folder(merged)), theirs(trained), atol=1e-5)
    assert AutoTokenizer.from_pretrained(merged).encode("1 + 1")
    (tmp_path / "next").mkdir()
    shutil.copy(trained / "task.jsonl", tmp_path / "next")
    train(tmp_path / "next", model__path=merged, train__steps=1)


def test_a_base_that_has_moved(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = tmp_path / "adapters"
    shutil.copytree(trained / "adapters", moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/model"}))
    for lora in ("true", "false"):
        line = refused(
            capsys, "train", *overrides(trained, **{**LORA, "model__lora__enabled": lora}, model__path=moved,
                                        run__dir=tmp_path / "run"),
        )  # fmt: skip
        assert "its base model /gone/model cannot be loaded" in line
        assert f"r3 models merge {moved} --base BASE --to FOLDER" in line
    assert not (tmp_path / "run").exists()
    merged = tmp_path / "merged"
    assert main(["models", "merge", str(moved), "--base", str(trained / "model"), "--to", str(merged)]) == 0
    assert torch.allclose(logits(from_folder(merged)), theirs(trained), atol=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model__lora__rank": 8}, "needs model.lora.rank=4; for other adapters merge these first"),
        ({"model__lora__alpha": 8}, "needs model.lora.alpha=32"),
        ({"method__objective__kl": 0.1}, "not the policy that this run goes on from"),
    ],
)
def test_what_would_be_another_experiment_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    settings = {**LORA, "model__path": trained / "adapters", "run__dir": tmp_path / "run", **more}
    assert said in refused(capsys, "train", *overrides(trained, **settings))
    assert not (tmp_path / "run").exists()


def test_merging_refuses_what_is_no_adapter(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "merged"
    for folder, hint in ((trained / "model", "holds no LoRA adapters"), (trained / "run", "step-000002/policy")):
        assert hint in refused(capsys, "models", "merge", folder, "--to", to)
    (trained / "adapters" / "adapter_model.safetensors").rename(trained / "gone")
    try:
        assert "do not fit" in refused(capsys, "models", "merge", trained / "adapters", "--to", to)
    finally:
        (trained / "gone").rename(trained / "adapters" / "adapter_model.safetensors")
    assert list(tmp_path.iterdir()) == []
