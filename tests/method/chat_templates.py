"""Chat templates of five families of models, written from their documented form, and tokenizers that know their marks.

The documented forms: the model cards and tokenizer_config.json of DeepSeek-R1-Distill, Qwen2.5, Qwen3, Llama 3 and
SmolLM2 on the Hugging Face hub, without their branches for tools.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}SYSTEM{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_NO_THOUGHT = (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)


def _with_default(system: str) -> str:
    return _CHATML.replace("SYSTEM", "{{ '<|im_start|>system\\n" + system + "<|im_end|>\\n' }}" if system else "")


TEMPLATES = {
    "r1-distill": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
    ),
    "qwen2.5": _with_default("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _with_default("") + _NO_THOUGHT,
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "smollm2": _with_default("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
}
_CHATML_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = {
    "r1-distill": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "qwen2.5": _CHATML_MARKS,
    "qwen3": _CHATML_MARKS,
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "smollm2": _CHATML_MARKS,
}
THOUGHTS = {"r1-distill": ("<think>", "</think>"), "qwen3": ("<think>", "</think>")}
"""Tokens of their own that are not special: decoding keeps them."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the family's marks and chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    marks = MARKS[family]
    core.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in THOUGHTS.get(family, ())])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=marks[0], eos_token=marks[-1])
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
