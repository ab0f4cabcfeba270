"""TRL's data rows and reward functions in r3's terms.

`FurtherRows` has further queries for resampling: the training data in a second order. TRL fixes before a run how many
steps its sampler gives; its epochs, `max_steps` and learning rate depend on that. So further queries are not taken from
the sampler's order, which would end too soon, but from a second one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np

from r3.integrations.common import prompt_id, text_of
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


FILE = "r3_resampling.json"


class FurtherRows:
    """The rows of the data, pass after pass, each pass shuffled: a pure function of the seed and of the position."""

    def __init__(self, rows: Any, *, seed: int, shuffle: bool) -> None:
        if not isinstance(rows, Sized):
            raise ValueError("resampling asks further rows of the data by number: give a dataset, not a stream")
        self.rows: Any = rows
        self.seed, self.shuffle = seed, shuffle
        self.position = 0
        """How many rows were taken: all that a checkpoint must store."""

    def take(self, count: int) -> list[Any]:
        """The next `count` rows."""
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def save(self, folder: str) -> None:
        """Write the position into a checkpoint, whole or not at all."""
        partial = Path(folder) / f"{FILE}.partial"
        partial.write_text(json.dumps({"position": self.position}))
        partial.replace(Path(folder) / FILE)

    def _at(self, position: int) -> Any:
        number, index = divmod(position, len(self.rows))
        if not self.shuffle:
            return self.rows[index]
        return self.rows[int(np.random.default_rng([self.seed, number]).permutation(len(self.rows))[index])]


def saved_position(checkpoint: str) -> int:
    """How many rows had been taken at a checkpoint; 0 if its run did not resample."""
    path = Path(checkpoint) / FILE
    return int(json.loads(path.read_text())["position"]) if path.exists() else 0


def by_rank(rounds: Sequence[int], ranks: int) -> list[int]:
    """The rows of all rounds in the order in which the ranks hold them, by their number in the order of the rounds.

    Each round's rows are dealt over the ranks, and a rank lays those of later rounds behind those of earlier ones.

    >>> by_rank([4, 2], 2)
    [0, 1, 4, 2, 3, 5]
    """
    first = np.cumsum([0, *rounds]).tolist()
    return [
        start + rank * (rows // ranks) + i
        for rank in range(ranks)
        for start, rows in zip(first, rounds, strict=False)
        for i in range(rows // ranks)
    ]
