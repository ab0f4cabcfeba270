"""TRL's data rows and reward functions in r3's terms."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from r3.integrations.common.prompts import prompt_id, text_of
from r3.samples import Query
from r3.verify.rewards import OutcomeWatch


def query_of(row: Mapping[str, Any], id_column: str | None) -> Query:
    """The query that a data row asks. Without an id column, equal prompts are the same query."""
    prompt = row["prompt"]
    if id_column is None:
        return Query(prompt_id(prompt), text_of(prompt))
    if id_column not in row:
        raise ValueError(f"the data has no column {id_column!r} (r3_id_column); it has {', '.join(sorted(row))}")
    return Query(str(row[id_column]), text_of(prompt))


def check_rows(rows: Iterable[Mapping[str, Any]], id_column: str | None) -> None:
    """Refuse an id that stands for two prompts; warn of a prompt whose rows differ in what else they say."""
    first: dict[str, tuple[str, str]] = {}
    differing = 0
    for row in rows:
        query_id, prompt = query_of(row, id_column).id, prompt_id(row["prompt"])
        rest = repr(sorted((name, value) for name, value in row.items() if name not in ("prompt", id_column)))
        known_prompt, known_rest = first.setdefault(query_id, (prompt, rest))
        if known_prompt != prompt:
            raise ValueError(f"r3_id_column={id_column!r}: two prompts have the id {query_id!r}; ids must be unique")
        differing += known_rest != rest
    if differing:
        warnings.warn(
            f"{differing} rows have the prompt of another row and differ in other columns: R³ keeps one history for "
            "them, so that an answer judged by one row's columns is replayed for the other; keep one of each, or give "
            "r3_id_column",
            stacklevel=3,
        )


def outcome_index(name: str | None, names: Sequence[str]) -> int:
    """Which reward function tells right from wrong."""
    if len(set(names)) < len(names):
        raise ValueError(
            f"two reward functions have the same name ({', '.join(names)}), and R³ keeps rewards by name: give each "
            "its own (__name__)"
        )
    if name is None and len(names) > 1:
        raise ValueError(
            f"several reward functions ({', '.join(names)}): name the one that tells right from wrong, e.g. "
            f"r3_outcome_reward={names[-1]!r}"
        )
    if name is None:
        return 0
    if name not in names:
        raise ValueError(f"r3_outcome_reward={name!r} is not among the reward functions: {', '.join(names)}")
    return list(names).index(name)


def outcome_watch(name: str, right_above: float) -> OutcomeWatch:
    """What warns if no answer is ever right, in TRL's names of the settings."""
    return OutcomeWatch(name, right_above, threshold="r3_right_above", outcome="r3_outcome_reward")
