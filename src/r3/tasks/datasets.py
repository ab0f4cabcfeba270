"""Maths sets by name, files and Hugging Face datasets as queries: stable ids, one prompt form, filters.

The named sets are files that are looked for in the folder that the environment variable R3_DATA names. Their rows have
`id`, `problem` and `answer`; a file of one's own needs a question and an answer column, whatever they are called.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.errors import MissingData, TaskError
from r3.samples import Message, Query
from r3.tasks.data_files import read_rows
from r3.tasks.task import Prompting, conversation, question_of

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class NamedSet:
    """A set that is known by name: which file holds it, how many rows it has, where it comes from."""

    title: str
    """As a results table calls it."""
    stem: str
    """The file's name without its suffix."""
    rows: int
    source: str
    """Where to get it."""
    licence: str


_DEEPSCALER = "github.com/agentica-project/deepscaler, deepscaler/data"
_QWEN = "github.com/QwenLM/Qwen2.5-Math, evaluation/data"
_GSM8K = "github.com/openai/grade-school-math, grade_school_math/data"
_MATHARENA = "MathArena (github.com/eth-sri/matharena), its data set MathArena"
_MATHARENA_LICENCE = "CC BY-NC-SA 4.0"

EVALUATION: Mapping[str, NamedSet] = {
    "aime24": NamedSet("AIME24", "eval_aime24", 30, f"{_DEEPSCALER}/test/aime.json", "MIT"),
    "aime25": NamedSet(
        "AIME25", "eval_aime25", 30, "github.com/PraMamba/DeepScaleR, deepscaler/data/test/aime-2025.json", "MIT"
    ),
    "math500": NamedSet("MATH500", "eval_math500", 500, f"{_DEEPSCALER}/test/math.json", "MIT"),
    "amc23": NamedSet("AMC23", "eval_amc23", 40, f"{_QWEN}/amc23/test.jsonl", "MIT"),
    "amc": NamedSet("AMC22-23", "eval_amc_2022_2023", 83, f"{_DEEPSCALER}/test/amc.json", "MIT"),
    "minerva": NamedSet("Minerva", "eval_minerva", 272, f"{_QWEN}/minerva_math/test.jsonl", "MIT"),
    "olympiadbench": NamedSet("Olympiad", "eval_olympiadbench", 675, f"{_DEEPSCALER}/test/olympiad_bench.json", "MIT"),
    "gsm8k-test": NamedSet("GSM8K", "eval_gsm8k_test", 1319, f"{_GSM8K}/test.jsonl", "MIT"),
    "hmmt25": NamedSet("HMMT25", "eval_hmmt25", 30, f"{_MATHARENA}/hmmt_feb_2025", _MATHARENA_LICENCE),
    "brumo25": NamedSet("BRUMO25", "eval_brumo25", 30, f"{_MATHARENA}/brumo_2025", _MATHARENA_LICENCE),
    "cmimc25": NamedSet("CMIMC25", "eval_cmimc25", 40, f"{_MATHARENA}/cmimc_2025", _MATHARENA_LICENCE),
}
TRAINING: Mapping[str, NamedSet] = {
    "deepscaler": NamedSet(
        "DeepScaleR",
        "train_deepscaler",
        30_295,
        "github.com/limenlp/verl, verl/data/deepscaler_*_train.parquet, and four smaller subsets of DeepScaleR",
        "Apache-2.0 and MIT",
    ),
    "math": NamedSet("MATH", "train_math", 7_468, f"{_DEEPSCALER}/train/math.json", "MIT"),
    "gsm8k": NamedSet("GSM8K", "train_gsm8k", 7_473, f"{_GSM8K}/train.jsonl", "MIT"),
}
_MBPP = "github.com/google-research/google-research, mbpp/mbpp.jsonl"
CODE: Mapping[str, NamedSet] = {
    "mbpp-train": NamedSet("MBPP train", "train_mbpp", 374, f"{_MBPP}, tasks 601 to 974", "CC BY 4.0"),
    "mbpp-valid": NamedSet("MBPP valid", "valid_mbpp", 90, f"{_MBPP}, tasks 511 to 600", "CC BY 4.0"),
    "mbpp": NamedSet("MBPP", "eval_mbpp", 500, f"{_MBPP}, tasks 11 to 510", "CC BY 4.0"),
    "humaneval": NamedSet("HumanEval", "eval_humaneval", 164, "github.com/openai/human-eval, data", "MIT"),
}
"""Judged by running it (`r3.tasks.code`): rows have `tests` in place of `answer`."""
SETS: Mapping[str, NamedSet] = {**TRAINING, **EVALUATION, **CODE}


TESTS = "tests"
"""The column that takes an answer's place where code is judged."""


@dataclass(frozen=True, slots=True)
class HelpColumns:
    """What a file calls the columns that some methods show or train on; None: the file has none."""

    demonstration: str | None = None
    hints: str | None = None
    feedback: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """What a file calls its columns. Two are enough: without an id, the id is a hash of the question."""

    question: str = "problem"
    answer: str = "answer"
    id: str = "id"
    needs_answer: bool = True
    """Whether a row without an answer is an error: judges that go by other columns need none."""
    help: HelpColumns = HelpColumns()


def load_set(
    name: str,
    *,
    folder: str | Path | None = None,
    prompting: Prompting | None = None,
    help: HelpColumns | None = None,
) -> list[Query]:
    """A named set, from `folder` or else from R3_DATA."""
    known = SETS.get(name)
    if known is None:
        raise TaskError(f"no data set {name!r}; known are {', '.join(SETS)}, or give the path of a file")
    path = find_file(known, folder)
    columns = Columns(answer=TESTS if name in CODE else "answer", help=help or HelpColumns())
    queries = queries_of(read_rows(path), path, columns=columns, prompting=prompting)
    if len(queries) != known.rows:
        raise TaskError(
            f"{path}: {len(queries):,} rows, but {name} has {known.rows:,}; get the whole file again "
            f"({known.source}), or give the path of a file of your own instead of the name {name}"
        )
    return queries


def load_file(path: Path, *, columns: Columns | None = None, prompting: Prompting | None = None) -> list[Query]:
    """A JSONL, JSONL.GZ, JSON, CSV or Parquet file of the user's own."""
    return queries_of(read_rows(path), path, columns=columns, prompting=prompting)


def load_hub(
    name: str,
    *,
    split: str = "train",
    config: str | None = None,
    columns: Columns | None = None,
    prompting: Prompting | None = None,
) -> list[Query]:
    """A data set of the Hugging Face hub, or of a folder that its `datasets` library reads."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskError(f"data set {name} needs Hugging Face datasets: pip install 'r3-rl[datasets]'") from error
    rows = datasets.load_dataset(name, config, split=split)
    return queries_of((dict(row) for row in rows), f"{name}, split {split}", columns=columns, prompting=prompting)


def find_file(known: NamedSet, folder: str | Path | None = None) -> Path:
    """The file of a named set in any of its formats."""
    data = folder or os.environ.get("R3_DATA")
    if data:
        for suffix in SUFFIXES:
            path = Path(data) / (known.stem + suffix)
            if path.is_file():
                return path
    where = f"{data} holds no {known.stem}" if data else f"no folder is given for {known.stem}"
    raise MissingData(
        f"{where}{{{','.join(SUFFIXES)}}}: set R3_DATA to the folder that holds it, with columns id, problem and "
        f"answer ({known.rows:,} rows, {known.licence}, from {known.source})"
    )


def queries_of(
    rows: Iterable[Mapping[str, Any]],
    where: str | Path,
    *,
    columns: Columns | None = None,
    prompting: Prompting | None = None,
) -> list[Query]:
    """Rows as queries, in their order. All columns of a row reach the judge; `problem` is always the question alone."""
    columns, prompting = columns or Columns(), prompting or Prompting()
    queries: dict[str, Query] = {}
    answers: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows, 1):
        at = f"{where}, row {number}"
        asked = _question(row, columns.question, at)
        problem = asked if isinstance(asked, str) else question_of(asked)
        if columns.question != "problem" and row.get("problem", problem) != problem:
            raise TaskError(
                f"{at}: column 'problem' is not the question, which is in {columns.question!r}, and functions and "
                "templates know the question by that name; rename the column"
            )
        whole = asked if isinstance(asked, str) else json.dumps([turn.as_dict() for turn in asked])
        query_id = _query_id(row, columns.id, whole, at)
        if query_id in queries:
            raise TaskError(f"{at}: id {query_id!r} appears twice; ids must be unique (task.id_column={columns.id})")
        answer = _answer(row, columns, at)
        other, first = answers.setdefault(whole, (answer, number))
        if other != answer:
            raise TaskError(
                f"{at}: the question of row {first} with another answer ({answer[:60]!r}, there "
                f"{other[:60]!r}); one of them is wrong: remove it"
            )
        try:
            query = prompting.query(query_id, asked, answer, {**row, "problem": problem})
        except TaskError as error:
            raise TaskError(f"{at}: {error}") from error
        queries[query_id] = _with_help(query, row, columns.help, at)
    if not queries:
        raise TaskError(f"{where} holds no problems; give a file with at least one row")
    return list(queries.values())


def _question(row: Mapping[str, Any], column: str, where: str) -> str | tuple[Message, ...]:
    """What a row asks: a text, or the turns of a chat."""
    value = row.get(column)
    if not isinstance(value, list | tuple):
        text = _text(row, column, where, (str,))
        if _is_written_chat(text):
            raise TaskError(
                f"{where}: column {column!r} holds a chat that was written out as text; give it as a list of messages "
                "(in JSONL or Parquet, which CSV cannot)"
            )
        return text
    turns = conversation(value, f"{where}, column {column!r}")
    return tuple(Message(turn.role, _whole(turn.content, column, where)) for turn in turns)


def _is_written_chat(text: str) -> bool:
    """Whether it is a list of messages as JSON or Python spells one: a table's cell that was a list once."""
    if not re.match(r"""\s*\[\s*\{\s*["'](role|content)["']""", text):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            turns = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns)
    return False


def _answer(row: Mapping[str, Any], columns: Columns, at: str) -> str:
    """The reference answer; nothing where the judge needs none."""
    if columns.answer == TESTS:
        return _tests(row, at)
    if not columns.needs_answer and row.get(columns.answer) is None:
        return ""
    return _text(row, columns.answer, at, (str, int, float))


def _with_help(query: Query, row: Mapping[str, Any], columns: HelpColumns, at: str) -> Query:
    """The query with its demonstration, hints and feedback, as far as the file has such columns."""
    if columns == HelpColumns():
        return query
    hints = _cell(row, columns.hints, "task.hint_column", at)
    texts = [hints] if isinstance(hints, str) else hints
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise TaskError(
            f"{at}: column {columns.hints!r} (task.hint_column) holds neither a text nor a list of texts: write each "
            "hint as a text that is not empty, the vaguest first, and none at all as null"
        )
    return replace(
        query,
        demonstration=_help(row, columns.demonstration, "task.demonstration_column", at),
        hints=tuple(_whole(text, str(columns.hints), at) for text in texts),
        feedback=_help(row, columns.feedback, "task.feedback_column", at),
    )


def _help(row: Mapping[str, Any], column: str | None, setting: str, at: str) -> str:
    """What the column says; nothing where it is empty for this row."""
    value = _cell(row, column, setting, at) or ""
    if not isinstance(value, str):
        raise TaskError(f"{at}: a {type(value).__name__} in column {column!r} ({setting}); write it as text")
    return _whole(value, str(column), at)


def _cell(row: Mapping[str, Any], column: str | None, setting: str, at: str) -> Any:
    """What is in a column that is named; an empty list where nothing is, or no column is named."""
    if column is None:
        return []
    if column not in row:
        raise TaskError(f"{at}: no column {column!r} (there are {', '.join(map(str, row))[:300]}); correct {setting}")
    value = row[column]
    return [] if value is None or (isinstance(value, str) and not value.strip()) else value


def _text(row: Mapping[str, Any], column: str, where: str, kinds: tuple[type, ...]) -> str:
    """What a column says, which must be something that a prompt or a judge can use."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise TaskError(
            f"{where}: nothing in column {column!r} (there are {', '.join(map(str, row))[:300]}); "
            "name the columns of the question and the answer: task.question_column, task.answer_column"
        )
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TaskError(f"{where}: a {type(value).__name__} in column {column!r}; write it as text")
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"{where}: {value} in column {column!r} is no answer; remove the row")
    return _whole(str(value), column, where)


def _tests(row: Mapping[str, Any], where: str) -> str:
    """Nothing: what judges a program are the tests themselves, which must be there."""
    if row.get(TESTS) in (None, ""):
        raise TaskError(f"{where}: nothing in column {TESTS!r} (there are {', '.join(map(str, row))[:300]})")
    return ""


def _query_id(row: Mapping[str, Any], column: str, problem: str, where: str) -> str:
    given = row.get(column)
    if given is None or given == "":
        return hashlib.sha1(problem.encode()).hexdigest()[:16]
    if not isinstance(given, str | int):
        raise TaskError(
            f"{where}: a {type(given).__name__} in column {column!r} (task.id_column); an id is a text or a number"
        )
    return _whole(str(given), column, where)


def _whole(text: str, column: str, where: str) -> str:
    """The text, if every tokenizer and the buffer can take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{where}: half a character (a lone surrogate) in column {column!r}; mend the text") from error
    return text


def select(
    queries: Iterable[Query],
    *,
    max_prompt_tokens: int | None = None,
    length: Callable[[Query], int] | None = None,
    difficulty: tuple[float, float] | None = None,
    sources: Collection[str] = (),
) -> list[Query]:
    """The queries that pass every filter that is given, in their order.

    `length` counts the tokens of a query's prompt. `difficulty` is a range of the column of that name (deepscaler's
    goes from 0 to 100, both ends count); a query without one is left out, since nothing says that it belongs. `sources`
    are values of the column `source`, whole or up to its first colon.
    """
    if max_prompt_tokens is not None and length is None:
        raise ValueError("max_prompt_tokens needs length, the function that counts the tokens of a query's prompt")
    kept = list(queries)
    if sources:
        wanted = set(sources)
        kept = [query for query in kept if wanted & _source_names(query)]
    if difficulty is not None:
        low, high = difficulty
        kept = [query for query in kept if low <= _difficulty(query) <= high]
    if max_prompt_tokens is not None and length is not None:  # last: it is the only one that costs time
        kept = [query for query in kept if length(query) <= max_prompt_tokens]
    return kept


def _source_names(query: Query) -> set[str]:
    source = str(query.columns.get("source", ""))
    return {source, source.partition(":")[0]}


def _difficulty(query: Query) -> float:
    value = query.columns.get("difficulty")
    return float("nan") if value is None else float(value)  # NaN is in no range
