"""From a GGUF file to a Hugging Face folder: bfloat16 weights, tokenizer, chat template, and checks of all three.

A model that transformers loaded from GGUF refuses to be saved, so a new one is built from its config and its weights.
The GGUF format does not say how a tokenizer splits text before merging; where numbers are split into digits first, that
step is put back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from r3.errors import ConfigError

SENTENCE = "The capital of France is Paris. Water boils at one hundred degrees Celsius, and ice is frozen water."
MOST_PERPLEXITY = 40.0
"""Any model worth training is below this perplexity on that sentence; with scrambled weights it is in the thousands."""
NUMBERS = ("7", "2024", "1234567890", "3 + 45 = 48", "x=120;   96/8")


def convert(gguf: Path, folder: Path, *, digits: bool) -> list[str]:
    """Write the folder and check it as a user would load it; one line for each thing checked."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    _require_gguf()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if digits:
        split_digits(tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures"):
        settings.pop(key, None)
    config = type(loaded.config)(**settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    ends = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return check_folder(folder, digits=digits)


def split_digits(tokenizer: Any) -> None:
    """Put the split into one digit per token before the tokenizer's other steps, as the original has it."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    first = pre_tokenizers.Digits(individual_digits=True)
    rest = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, *rest])


def check_folder(folder: Path, *, digits: bool) -> list[str]:
    """Load what was written and check numbers, chats and plain English."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said = [check_numbers(tokenizer)] if digits else []
    said.append(check_chat(tokenizer))
    measured = perplexity(model, tokenizer.encode(SENTENCE))
    if not measured < MOST_PERPLEXITY:
        raise ConfigError(f"{folder}: perplexity {measured:.0f} on plain English; the conversion failed")
    return [*said, f"perplexity on a sentence of plain English: {measured:.1f}"]


def check_numbers(tokenizer: Any) -> str:
    """Check that every digit is its own token, and that text survives encoding and decoding."""
    for text in NUMBERS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = [tokenizer.decode([i]) for i in ids]
        joined = [piece for piece in pieces if any(c.isdigit() for c in piece) and len(piece) > 1]
        if joined or tokenizer.decode(ids) != text:
            raise ConfigError(f"the tokenizer does not read {text!r} digit by digit: {pieces}")
    return "numbers are read digit by digit and come back as they were"


def check_chat(tokenizer: Any) -> str:
    """Check that the chat template's special tokens are single ids and that a prompt ends where an answer begins."""
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template")
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.eos_token_id not in ids or "2 + 3" not in tokenizer.decode(ids):
        raise ConfigError(f"the chat template does not close its turns with the end-of-text token: {text!r}")
    return f"chat template: {len(ids)} tokens for a short question"


def perplexity(model: Any, ids: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of the tokens after the first."""
    import torch

    with torch.no_grad():
        given = torch.tensor([list(ids)])
        logs = model(input_ids=given).logits[0, :-1].float().log_softmax(-1)
    return math.exp(-float(logs.gather(1, given[0, 1:, None]).mean()))


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError("reading GGUF weights needs gguf: pip install 'r3-rl[models]'") from error
