"""verl's data rows in r3's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from r3.errors import ConfigError
from r3.integrations.common import prompt_id, text_of
from r3.integrations.verl import KEY
from r3.samples import Query


def query_of(prompt: Any, index: Any, query_key: str) -> Query:
    """The query that a row asks, under the id its history is kept by."""
    turns = [dict(turn) for turn in prompt]
    return Query(str(index) if query_key == "index" else prompt_id(turns), text_of(turns))


def check_ids(dataset: Any, query_key: str) -> None:
    """Refuse data whose rows would share a history: without `extra_info.index` verl gives every row index 0."""
    if query_key == "prompt":
        return
    infos: Sequence[Any] = dataset.dataframe["extra_info"] if "extra_info" in dataset.dataframe.column_names else [{}]
    ids = Counter(str((info or {}).get("index")) for info in infos)
    fix = f"make the data with `r3 data verl`, or keep histories by the prompt: ++{KEY}.query_key=prompt"
    if "None" in ids:
        raise ConfigError(f"{ids['None']} rows of data.train_files have no extra_info.index: {fix}")
    twice = [index for index, n in ids.items() if n > 1]
    if twice:
        raise ConfigError(f"{len(twice)} values of extra_info.index are not unique, e.g. {twice[0]!r}: {fix}")


class Templated:
    """A tokenizer whose chat template is applied with the options that verl applies it with."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self.tokenizer.get_added_vocab())

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.tokenizer.all_special_tokens)

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation, **{**self.options, **options})
