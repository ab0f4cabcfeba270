"""TRL's data rows and reward functions in r3's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from r3.integrations.common.prompts import prompt_id, text_of
from r3.samples import Query


def query_of(row: Mapping[str, Any], id_column: str | None) -> Query:
    """The query that a data row asks. Without an id column, equal prompts are the same query."""
    prompt = row["prompt"]
    if id_column is None:
        return Query(prompt_id(prompt), text_of(prompt))
    if id_column not in row:
        raise ValueError(f"the data has no column {id_column!r} (r3_id_column); it has {', '.join(sorted(row))}")
    return Query(str(row[id_column]), text_of(prompt))


def outcome_index(name: str | None, names: Sequence[str]) -> int:
    """Which reward function tells right from wrong."""
    if name is None:
        return 0
    if name not in names:
        raise ValueError(f"r3_outcome_reward={name!r} is not among the reward functions: {', '.join(names)}")
    return list(names).index(name)
