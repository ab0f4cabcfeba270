"""The models of the GPU benchmarks: real architectures with random weights, and a folder that any engine can load.

Speed does not depend on what the weights are, only on how many there are. Random weights write no end-of-text, so
every benchmark fixes how long each response is (see `work.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 by its dimensions; embeddings are not tied."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    positions: int = 131_072

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )

    @property
    def parameters(self) -> int:
        """Weights, embeddings included."""
        kv = self.kv_heads * self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + self.hidden + 2 * kv
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 2


PAD, EOS = 0, 1
SHAPES = {
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151_936),  # DeepSeek-R1-Distill-Qwen-1.5B
    "7b": Shape(3584, 28, 28, 4, 18944, 152_064),  # DeepSeek-R1-Distill-Qwen-7B
    "tiny": Shape(64, 2, 4, 2, 128, 512, 16_384),  # to try the scripts on a CPU
}


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """The model with seeded random weights, made on the device itself."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(shape.config()).eval()
    finally:
        torch.set_default_dtype(before)


def word_tokenizer(vocabulary: int) -> Any:
    """One word a token id: `w17` is token 17, so that text and ids are the same thing in every engine."""
    words = {"<pad>": PAD, "</s>": EOS, **{f"w{i}": i for i in range(2, vocabulary)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<pad>", pad_token="<pad>", eos_token="</s>")


def model_folder(shape: Shape, folder: Path, *, weights: torch.device | None = None) -> Path:
    """Config and tokenizer in Hugging Face's format; with `weights`, also random bfloat16 weights made on that device.

    Without weights an engine must be told to invent some (vLLM: load_format="dummy").
    """
    if weights is not None:
        random_model(shape, weights, torch.bfloat16).save_pretrained(folder)
    else:
        config = shape.config()
        config.architectures, config.dtype = ["Qwen2ForCausalLM"], torch.bfloat16
        config.save_pretrained(folder)
    word_tokenizer(shape.vocabulary).save_pretrained(folder)
    return folder
