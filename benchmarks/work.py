"""What the GPU benchmarks compare engines on: models of real shapes with random weights, the same prompts, and for
every response the same length, fixed by a seed.

Speed does not depend on what the weights are, only on how many there are; and random weights write no end-of-text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from r3.rollout import Request, Sampling


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
    "135m": Shape(576, 30, 9, 3, 1536, 49_152),  # SmolLM2-135M, embeddings not tied
    "bundled": Shape(128, 4, 4, 4, 256, 101),  # the model that comes with r3
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
    """One word per token id: `w17` is token 17, so that text and ids are the same thing in every engine."""
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


SPREAD = 0.7
"""Standard deviation of the logarithm of a length: at a mean of 2,500, one response in fifty reaches 8,192."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how long each response to each of them is."""

    prompts: tuple[npt.NDArray[np.int32], ...]
    lengths: tuple[tuple[int, ...], ...]
    seed: int

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    @property
    def context(self) -> int:
        """Longest prompt with the longest response."""
        return max(map(len, self.prompts)) + self.longest

    def shortened(self, limit: int) -> Work:
        """The same prompts, no response longer than the limit."""
        return replace(self, lengths=tuple(tuple(min(length, limit) for length in row) for row in self.lengths))

    def flat(self) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
        """Every response on its own: its prompt and its length."""
        for prompt, lengths in zip(self.prompts, self.lengths, strict=True):
            for length in lengths:
                yield prompt, length

    def requests(self) -> list[Request]:
        """As r3's engines take it: one request per prompt, each response under its own limit."""
        return [
            Request(prompt, len(lengths), seed=self.seed + place, limits=lengths)
            for place, (prompt, lengths) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]

    def sampling(self) -> Sampling:
        """No token ends a response: its limit does."""
        return Sampling(max_tokens=self.longest, stop_tokens=())

    def describe(self) -> str:
        rows = sum(map(len, self.lengths))
        return f"{len(self.prompts)} prompts, {rows} responses, {self.tokens:,} tokens, longest {self.longest:,}"


def uniform(rows: int, context: int, new: int, *, vocabulary: int, seed: int) -> Work:
    """As many different prompts as rows, all of one length, each answered once by `new` tokens."""
    rng = np.random.default_rng(seed)
    return Work(tuple(_prompt(rng, context, vocabulary) for _ in range(rows)), ((new,),) * rows, seed)


def ragged(prompts: int, group: int, *, mean: float, limit: int, vocabulary: int, seed: int) -> Work:
    """Prompts of 150 to 300 tokens, each answered `group` times at log-normal lengths, cut at the limit."""
    rng = np.random.default_rng(seed)
    made = tuple(_prompt(rng, int(rng.integers(150, 301)), vocabulary) for _ in range(prompts))
    lengths = tuple(tuple(map(int, row)) for row in lognormal(rng, (prompts, group), mean=mean, limit=limit))
    return Work(made, lengths, seed)


def ragged_of(options: argparse.Namespace, seed: int) -> Work:
    """Ragged work as the command line asks for it."""
    return ragged(
        options.prompts,
        options.group,
        mean=options.mean,
        limit=options.limit,
        vocabulary=SHAPES[options.shape].vocabulary,
        seed=seed,
    )


def lognormal(rng: np.random.Generator, size: tuple[int, ...], *, mean: float, limit: int) -> npt.NDArray[np.int64]:
    """Lengths whose mean, before the limit cuts them, is `mean`."""
    drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, size)
    return np.clip(np.rint(drawn), 1, limit).astype(np.int64)


def _prompt(rng: np.random.Generator, length: int, vocabulary: int) -> npt.NDArray[np.int32]:
    return rng.integers(EOS + 1, vocabulary, length, dtype=np.int32)
