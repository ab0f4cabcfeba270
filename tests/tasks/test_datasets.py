"""Named sets and files as queries: found or explained, stable ids, filters, an order that only the seed decides."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from r3.errors import TaskError
from r3.samples import Message, Query
from r3.tasks.datasets import (
    SETS,
    Columns,
    load_file,
    load_hub,
    load_set,
    seeded_order,
    select,
)
from r3.tasks.task import INSTRUCTION, Prompting

DATA = Path(__file__).parents[1] / "data"
SMALL = {"aime24": 30, "aime25": 30, "amc23": 40}


@pytest.mark.parametrize("name", SMALL)
def test_named_sets_are_found_through_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3_DATA", str(DATA))
    queries = load_set(name)
    assert len(queries) == SMALL[name] == SETS[name].rows
    rows = [json.loads(line) for line in (DATA / f"{SETS[name].stem}.jsonl").read_bytes().split(b"\n") if line]
    assert [query.id for query in queries] == [row["id"] for row in rows]
    assert [query.answer for query in queries] == [row["answer"] for row in rows]
    assert queries[0].prompt == (Message("user", f"{rows[0]['problem']}\n\n{INSTRUCTION}"),)
    assert all(query.answer for query in queries)


def test_prompts_may_be_plain_text() -> None:
    plain = load_set("aime24", folder=DATA, prompting=Prompting(chat=False, instruction=""))
    assert [query.prompt for query in plain] == [query.columns["problem"] for query in plain]


@pytest.mark.parametrize("name", SETS)
def test_a_missing_set_says_which_file_where_and_from_whom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("R3_DATA", raising=False)
    with pytest.raises(TaskError, match="set R3_DATA to the folder that holds it") as unset:
        load_set(name)
    with pytest.raises(TaskError) as empty:
        load_set(name, folder=tmp_path)
    assert str(tmp_path) in str(empty.value)
    for error in (unset, empty):
        assert SETS[name].stem in str(error.value)
        assert "github.com/" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_cut_download_is_refused(tmp_path: Path) -> None:
    whole = (DATA / "eval_aime24.jsonl").read_bytes().split(b"\n")
    (tmp_path / "eval_aime24.jsonl").write_bytes(b"\n".join(whole[:20]) + b"\n")
    with pytest.raises(TaskError, match="20 rows, but aime24 has 30"):
        load_set("aime24", folder=tmp_path)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(TaskError, match="no data set 'aime'; known are deepscaler, math, gsm8k, aime24"):
        load_set("aime")


ROWS = [{"question": f"{i} + {i}?\u2028(in words)", "gold": str(2 * i), "level": i} for i in range(1, 5)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz", "own.json", "own.parquet"])
def test_two_columns_of_any_name_are_enough(tmp_path: Path, name: str) -> None:
    queries = load_file(write(tmp_path / name, ROWS), columns=Columns("question", "gold"))
    assert [query.answer for query in queries] == ["2", "4", "6", "8"]
    assert [query.columns["level"] for query in queries] == [1, 2, 3, 4]
    assert queries[0].columns["problem"] == ROWS[0]["question"]
    shuffled = load_file(write(tmp_path / f"back-{name}", ROWS[::-1]), columns=Columns("question", "gold"))
    assert [query.id for query in shuffled] == [query.id for query in queries][::-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no problems"),
        ('{"problem": "1?"}\n', "row 1: nothing in column 'answer'"),
        ('{"problem": "1?", "answer": ""}\n', "row 1: nothing in column 'answer'"),
        ('{"problem": "1?", "answer": "1", "id": "a"}\n{"problem": "2?", "answer": "2", "id": "a"}\n', "appears twice"),
        ('{"problem": "1?", "ans', "line 1: not JSON"),
        ("[1]\n", "line 1: a list, not an object"),
    ],
)
def test_bad_files_name_the_row(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(TaskError, match=message):
        load_file(tmp_path / "own.jsonl")


def test_hugging_face_datasets_are_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(TaskError, match=r"pip install 'r3-rl\[datasets\]'"):
        load_hub("owner/name")


def test_hugging_face_datasets_give_the_same_queries_as_the_file(tmp_path: Path) -> None:
    """The library itself, over a folder, in a process of its own: it decides at import where it caches."""
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"question": f"{i}+{i}", "gold": str(2 * i)} for i in range(1, 5)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = f"""
from r3.tasks.settings import FileSettings
from r3.tasks.files import FileTask
task = FileTask(FileSettings(name="file", path="hf:{folder}@test", heldout=1, question_column="question",
                             answer_column="gold"))
print([query.id for query in task.train], [query.answer for query in task.heldout])
"""
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **offline}, check=True
    )
    queries = load_file(folder / "test.jsonl", columns=Columns("question", "gold"))
    assert done.stdout.strip() == f"{[query.id for query in queries[:3]]} {[queries[3].answer]}"


QUERIES = [
    Query("a", "x" * 3, "1", {"difficulty": 0.0, "source": "one/repo:file"}),
    Query("b", "x" * 30, "2", {"difficulty": 50, "source": "one/repo:other"}),
    Query("c", "x" * 9, "3", {"difficulty": 100.0, "source": "two/repo:file"}),
    Query("d", "x" * 10, "4", {"source": "two/repo:file"}),
]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, "abcd"),
        ({"difficulty": (0, 50)}, "ab"),
        ({"difficulty": (50, 100)}, "bc"),
        ({"sources": ["one/repo"]}, "ab"),
        ({"sources": ["one/repo:file", "two/repo"]}, "acd"),
        ({"max_prompt_tokens": 9, "length": lambda query: len(query.prompt)}, "ac"),
        ({"sources": ["two/repo"], "difficulty": (0, 100)}, "c"),
    ],
)
def test_filters(filters: dict[str, Any], kept: str) -> None:
    assert "".join(query.id for query in select(QUERIES, **filters)) == kept


def test_a_limit_on_tokens_needs_a_way_to_count() -> None:
    with pytest.raises(ValueError, match="needs length"):
        select(QUERIES, max_prompt_tokens=3)


@given(st.permutations(range(12)), st.integers(0, 2**32), st.sets(st.integers(0, 11)))
def test_the_order_is_the_seeds_alone(places: list[int], seed: int, dropped: set[int]) -> None:
    def queries(some: list[int]) -> list[Query]:
        return [Query(f"q{i}", "?") for i in some]

    order = [query.id for query in seeded_order(queries(list(range(12))), seed)]
    assert [query.id for query in seeded_order(queries(places), seed)] == order
    rest = [query.id for query in seeded_order(queries([i for i in places if i not in dropped]), seed)]
    assert rest == [name for name in order if int(name[1:]) not in dropped]


def test_seeds_give_different_orders() -> None:
    queries = [Query(f"q{i}", "?") for i in range(50)]
    firsts = {seeded_order(queries, seed)[0].id for seed in range(40)}
    assert len(firsts) > 15
