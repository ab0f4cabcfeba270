"""Real Hugging Face tokenizers, made on the spot: one character-level, one byte-level BPE with a chat template."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "What is 12 + 30? Let us compute step by step: first the tens, then the ones.",
    "The attempt above is wrong. Find where it goes wrong and solve the problem again.",
    "A previous attempt at this problem: \\frac{1}{2} + \\frac{1}{3} = \\frac{5}{6}, so \\boxed{5/6}.",
]


@cache
def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; what is not ASCII is <unk>."""
    alphabet = ["<unk>", "<eos>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


@cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (so that characters may span tokens), with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
