"""A tiny untrained model with one token per character: small enough to learn a task from scratch on a CPU in minutes.

It has the shape of the bundled model, 0.67 M parameters. `r3 sft` teaches it a task's written solutions; from then on
it is a policy like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = ("\n", *map(chr, range(32, 127)), "…")


@dataclass(frozen=True)
class Shape:
    """The dimensions of the model."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 256
    context: int = 512


def character_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """One token per character; characters outside the alphabet become <unk>; no token is added automatically."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def untrained(shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A model of this shape with weights drawn from the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)
