"""TRL's data rows and reward functions in r3's terms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from r3.method.reflection import Asked
from r3.samples import Message, Query


def query_of(row: Mapping[str, Any], id_column: str | None) -> Query:
    """The query that a data row asks. Without an id column, equal prompts are the same query."""
    prompt = row["prompt"]
    if id_column is None:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
        return Query(hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), _from_trl(prompt))
    if id_column not in row:
        raise ValueError(f"the data has no column {id_column!r} (r3_id_column); it has {', '.join(sorted(row))}")
    return Query(str(row[id_column]), _from_trl(prompt))


def _from_trl(prompt: Any) -> Asked:
    if isinstance(prompt, str):
        return prompt
    for turn in prompt:
        if not isinstance(turn["content"], str):
            raise ValueError("R3Trainer trains on text: a prompt's content must be a string, not a list of parts")
    return tuple(Message(turn["role"], turn["content"]) for turn in prompt)


def as_trl(asked: Asked) -> str | list[dict[str, str]]:
    """A prompt in the form of the data set's."""
    if isinstance(asked, str):
        return asked
    return [{"role": turn.role, "content": turn.content} for turn in asked]


def outcome_index(name: str | None, names: Sequence[str]) -> int:
    """Which reward function tells right from wrong."""
    if name is None:
        return 0
    if name not in names:
        raise ValueError(f"r3_outcome_reward={name!r} is not among the reward functions: {', '.join(names)}")
    return list(names).index(name)
