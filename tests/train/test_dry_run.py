"""`--dry-run` refuses what training would refuse, with exit code 2, and writes nothing.

Covers r3.train.dryrun, r3.train.build, r3.train.checks.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from r3.cli import main
from r3.config import load_config
from r3.train import build
from r3.train.dryrun import dry_run
from tests.tokenizing import char_tokenizer
from tests.train.test_bad_input import refused
from tests.train.tiny import ROOT, overrides, run_r3, save_model, save_task


def without_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def without_an_end(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = folder / "model" / name
        told = json.loads(path.read_text())
        told.pop("eos_token", None)
        told["eos_token_id"] = None
        path.write_text(json.dumps(told))


def twice(folder: Path) -> None:
    path = folder / "task.jsonl"
    path.write_text(path.read_text() * 2)


def a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text('{"format": 1}')


def a_thesis(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("work of years")


def a_file_in_the_way(folder: Path) -> None:
    (folder / "run").write_text("")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "settings", "told"),
    [
        (nothing, {"task__verifier": "tests.nothing.judge"}, "cannot import it"),
        (twice, {}, "appears twice; ids must be unique"),
        (nothing, {"task__heldout": 12}, "nothing is left to train on"),
        (nothing, {"task__path": "no.jsonl"}, "no file no.jsonl"),
        (nothing, {"task__pass_rates_from": "no-run"}, "no-run: not a run directory"),
        (nothing, {"run__wandb": "true"}, "pip install 'r3-rl[wandb]'"),
        (nothing, {"rollout__engine": "vllm"}, "vLLM is not installed"),
        (nothing, {"model__device": "cuda"}, "torch sees no CUDA card"),
        (
            nothing,
            {"model__lora__enabled": "true", "model__lora__targets": "[nowhere]"},
            "model.lora.targets=['nowhere']",
        ),
        (nothing, {"rollout__max_tokens": 250}, "the model's context is 256"),
        (nothing, {"run__dir": "runs/{model}"}, "can be filled in"),
        (without_weights, {}, "holds no weights"),
        (without_an_end, {}, "no answer could ever end"),
        (a_run, {}, "already holds a run"),
        (a_thesis, {}, "not empty and not a run directory"),
        (a_file_in_the_way, {}, "is a file, not a directory"),
    ],
)
def test_it_refuses_what_training_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Any,
    settings: dict[str, Any],
    told: str,
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == "wandb" else there(name))
    save_model(tmp_path / "model")
    save_task(tmp_path / "task.jsonl")
    spoil(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    given = overrides(tmp_path, **settings)
    assert told in refused(capsys, "train", "--dry-run", *given)
    assert main(["train", *given]) in (1, 2)
    assert "unexpected" not in capsys.readouterr().err
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_what_passes_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = overrides(tmp_path, model__lora__enabled="true", train__steps=1)
    assert main(["train", "--dry-run", *given]) == 0
    assert "dry run passed" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert main(["train", "--quiet", *given]) == 0


def test_its_memory_is_near_what_a_run_takes(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    more = {"rollout__group_size": 8, "method__reflection": "off", "train__steps": 5, "task__heldout": 0}
    settings = overrides(tmp_path, rollout__max_tokens=32, **more)
    told = run_r3("train", "--dry-run", *settings).stdout
    match = re.search(r"([0-9.]+) GB  at most at once", told)
    assert match is not None
    run_r3("train", "--quiet", *settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    peak = json.loads(lines[-1])["memory/peak_gb"]
    assert 0.7 < float(match[1]) / peak < 1.3, (told, peak)


def test_what_is_drawn_on_servers_takes_no_memory_here() -> None:
    given = ["rollout.engine=vllm-server", "rollout.servers=[http://a:8000]"]
    told = {
        ahead: dry_run(load_config(ROOT / "recipes" / "deepscaler-1.5b.yaml", [*given, f"rollout.ahead={ahead}"]))
        for ahead in (0, 1)
    }
    here = dry_run(load_config(ROOT / "recipes" / "deepscaler-1.5b.yaml"))
    assert "KV cache" in here
    for text in told.values():
        sizes = [float(size) for size in re.findall(r"^memory +([0-9.]+) GB  (?!at most)", text, re.MULTILINE)]
        assert "KV cache" not in text
        assert "before the update" not in text
        assert re.search(rf"{sum(sizes):.1f}\d? GB  at most at once \(answers are drawn on rollout.servers\)", text), (
            text
        )


# -------------------------------------------------------------------- docs/scale.md

SCALE = (ROOT / "docs" / "scale.md").read_text()
PER_CARD = r"^\| ([^|]*(?:cards?)[^|]*) \| (\d+) GB \| (\d+) GB \|$"
"""A row of the table of memory per card: how many there are, and what each holds at 1.5B and at 7B."""


def dry(recipe: str, processes: int, shard: str = "true") -> str:
    return dry_run(load_config(ROOT / "recipes" / f"{recipe}.yaml", [f"train.shard={shard}"]), processes)


def kept(told: str) -> float:
    """Gigabytes that a card holds whatever it is doing, but for activations, logits and cache."""
    lines = re.findall(r"^memory +([0-9.]+) GB  (?:weights|gradients|optimiser)", told, re.MULTILINE)
    assert len(lines) == 3
    return sum(map(float, lines))


def test_the_table_of_memory_is_what_a_dry_run_says() -> None:
    rows = re.findall(PER_CARD, SCALE, re.MULTILINE)
    assert len(rows) == 4
    for cards, *sizes in rows:
        for recipe, size in zip(("deepscaler-1.5b", "deepscaler-7b"), sizes, strict=True):
            if cards.startswith("one card"):
                told = [dry(recipe, 1), dry(recipe, 8, shard="false")]
            else:
                told = [dry(recipe, int(cards.split()[0]))]
            assert {round(kept(one)) for one in told} == {int(size)}, (cards, recipe)


def test_the_dry_run_that_is_shown_is_the_one_of_today() -> None:
    shown = SCALE.partition("--dry-run --processes 8 train.shard=true\n")[2].partition("```")[0]
    lines = [line for line in shown.splitlines() if line.startswith("memory")]
    assert len(lines) == 7
    told = dry("deepscaler-7b", 8).splitlines()
    assert lines == [line for line in told if line.startswith("memory")]
