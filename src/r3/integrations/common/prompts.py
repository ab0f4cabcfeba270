"""A trainer's prompts (plain text, or chat turns as dictionaries) in r3's terms, and back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from r3.samples import Message, PromptText


def prompt_id(prompt: Any) -> str:
    """A hash of the prompt as id: in data without ids, equal prompts are the same query."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def text_of(prompt: Any) -> PromptText:
    """The prompt as text or messages."""
    if isinstance(prompt, str):
        return prompt
    for turn in prompt:
        if not isinstance(turn["content"], str):
            raise ValueError("R³ trains on text: a prompt's content must be a string, not a list of parts")
    return tuple(Message(turn["role"], turn["content"]) for turn in prompt)


def turns_of(text: PromptText) -> str | list[dict[str, str]]:
    """The prompt in the form of the trainer's data."""
    if isinstance(text, str):
        return text
    return [turn.as_dict() for turn in text]
