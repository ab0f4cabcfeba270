"""verl's data: a task's queries as the Parquet files that verl reads (`r3 data verl`), and its rows in r3's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r3.config import Config
from r3.errors import ConfigError
from r3.integrations.common import prompt_id, text_of, turns_of
from r3.integrations.verl import KEY
from r3.samples import Query
from r3.tasks import load_problems
from r3.tasks.settings import FileSettings

# ---------------------------------------------------------------- Parquet files


def row_of(query: Query, source: str, split: str) -> dict[str, Any]:
    """One query as verl's data rows are laid out; a prompt of plain text becomes a user's turn."""
    turns = turns_of(query.prompt)
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": turns}] if isinstance(turns, str) else turns,
        "reward_model": {"style": "rule", "ground_truth": query.answer},
        "extra_info": {"index": query.id, "split": split},
    }


def write(queries: Sequence[Query], path: Path, source: str, split: str) -> None:
    """A Parquet file of the queries, each under an id of its own."""
    twice = [name for name, n in Counter(query.id for query in queries).items() if n > 1]
    if twice:
        raise ConfigError(f"{len(twice)} ids come more than once, e.g. {twice[0]!r}: give task.id_column unique values")
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError("writing Parquet needs pyarrow: pip install 'r3-rl[parquet]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([row_of(query, source, split) for query in queries])
    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial)
    partial.replace(path)  # whole or not at all


def export(config: Config, folder: Path) -> list[str]:
    """Write the config's task to `folder`; what was written and how verl is to judge it, line by line."""
    path = config.task.path if isinstance(config.task, FileSettings) else config.task.name
    source = Path(path).stem if Path(path).suffix else path  # verl's metrics of held-out queries bear its name
    task = load_problems(config.task, config.run.seed)
    said = []
    try:
        for name, queries in (("train", task.train), ("heldout", task.heldout)):
            if queries:
                write(queries, folder / f"{name}.parquet", source, name)
                said.append(f"written    {folder / f'{name}.parquet'}: {len(queries):,} queries")
    finally:
        task.judge.close()
    if not isinstance(config.task, FileSettings) or config.task.verifier != "math" or config.task.rewards:
        own = " with task.rewards" if config.task.rewards else ""
        judge = (
            config.task.verifier if isinstance(config.task, FileSettings) else f"that of the task {config.task.name}"
        )
        said.append(
            f"note       r3_reward judges the last \\boxed{{}} as maths, and this task's verifier is {judge}{own}: "
            "give verl yours with reward.custom_reward_function.path and .name"
        )
    return said


# ---------------------------------------------------------------- rows


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
