"""Named sets and files as queries: found or explained, stable ids, an order by the seed; planted leaks are found.

Covers r3.tasks.leakage.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from r3.cli import main
from r3.errors import TaskError
from r3.samples import Message, Query
from r3.tasks.datasets import (
    SETS,
    Columns,
    load_file,
    load_hub,
    load_set,
    select,
)
from r3.tasks.leakage import Leak, Problem, check, find_leaks, problems_of
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


# Leaks that are planted are found, with their kind; the index finds what comparing every pair finds.


QUESTION = (
    "A box holds 12 red and 30 blue balls. Two balls are drawn one after the other without putting any back. "
    "What is the probability $\\frac{p}{q}$ that both of them are red? Give the sum $p + q$ of the two."
)


def kinds(train: str, evaluation: str, answers: tuple[str, str] = ("298", "298")) -> list[str]:
    leaks = find_leaks([Problem("t", train, answers[0])], [Problem("e", evaluation, answers[1])])
    return [leak.kind for leak in leaks]


@pytest.mark.parametrize(
    ("train", "kind"),
    [
        (QUESTION, "exact"),
        (QUESTION.replace(" ", "\n  "), "exact"),
        (QUESTION.replace("$\\frac{p}{q}$", "\\( \\dfrac{p} {q} \\)"), "normalised"),
        (QUESTION.replace("$p + q$", "p+q").upper().replace("\\FRAC", "\\frac"), "normalised"),
        (QUESTION.replace("A box", "An urn"), "near"),
        (QUESTION.replace("What is the", "Find the"), "near"),
    ],
)
def test_each_kind_is_found(train: str, kind: str) -> None:
    assert kinds(train, QUESTION) == [kind]


@pytest.mark.parametrize(
    "train",
    [
        QUESTION.replace("12", "15").replace("A box", "An urn"),  # the template with another number
        "How many primes are there below 12 and 30?",
        "",
    ],
)
def test_other_problems_are_left_alone(train: str) -> None:
    assert kinds(train, QUESTION) == []


def test_a_reworded_problem_with_another_answer_is_another_problem() -> None:
    assert kinds(QUESTION.replace("A box", "An urn"), QUESTION, ("298", "299")) == []
    assert kinds(QUESTION.replace("A box", "An urn"), QUESTION, ("", "299")) == ["near"]  # unknown is not another


def test_fractions_are_the_same_however_they_are_written() -> None:
    assert kinds("What is \\frac16 of 30?", "What is $1/6$ of $30$?") == ["normalised"]
    assert kinds("What is \\dfrac{1}{6} of 30?", "What is $1/6$ of $30$?") == ["normalised"]


def test_empty_texts_are_not_alike() -> None:
    assert kinds("$$ ?", "... $?") == []


def test_every_problem_of_a_set_leaks_into_itself_only() -> None:
    problems = problems_of(load_set("aime24", folder=DATA))
    assert find_leaks(problems, problems) == [Leak(p.id, p.id, "exact", 1.0) for p in problems]
    assert find_leaks(problems, problems_of(load_set("aime25", folder=DATA))) == []


words = st.lists(
    st.sampled_from(["if", "the", "sum", "of", "two", "odd", "3", "7", "is", "what"]), min_size=4, max_size=11
)


@given(st.lists(words, max_size=6), st.lists(words, max_size=6))
def test_the_index_finds_what_comparing_every_pair_finds(train: list[list[str]], evaluation: list[list[str]]) -> None:
    def shingles(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + 6]) for i in range(len(text) - 5)} if len(text) >= 6 else {tuple(text)}

    expected = set()
    for (i, one), (j, other) in itertools.product(enumerate(train), enumerate(evaluation)):
        shared = len(shingles(one) & shingles(other))
        jaccard = shared / len(shingles(one) | shingles(other))
        contained = shared / min(len(shingles(one)), len(shingles(other)))
        numbers = [sorted(re.findall(r"\d", " ".join(text))) for text in (one, other)]
        alike = jaccard >= 0.6 or (jaccard >= 0.45 and contained >= 0.8)
        if one == other:
            expected.add((f"t{i}", f"e{j}", "exact"))
        elif "".join(one) == "".join(other):
            expected.add((f"t{i}", f"e{j}", "normalised"))
        elif alike and numbers[0] == numbers[1]:
            expected.add((f"t{i}", f"e{j}", "near"))
    left = [Problem(f"t{i}", " ".join(text), "1") for i, text in enumerate(train)]
    right = [Problem(f"e{j}", " ".join(text), "1") for j, text in enumerate(evaluation)]
    assert {(leak.train, leak.evaluation, leak.kind) for leak in find_leaks(left, right)} == expected


def test_check_prints_a_table_and_says_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (DATA / "eval_aime25.jsonl").read_text().splitlines()]
    clean = tmp_path / "clean.jsonl"
    clean.write_text(json.dumps({"problem": QUESTION}) + "\n")
    assert check(str(clean), ["aime24", "aime25"], folder=DATA) == 0
    assert "no leaks found" in capsys.readouterr().out
    leaky = tmp_path / "leaky.jsonl"
    planted = {"id": "mine", "problem": "  ".join(rows[4]["problem"].split(" ")), "answer": rows[4]["answer"]}
    leaky.write_text(clean.read_text() + json.dumps(planted) + "\n")
    assert check(str(leaky), ["aime24", "aime25"], folder=DATA) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^aime24 +30 +0 +0 +0$", printed, re.MULTILINE)
    assert re.search(r"^aime25 +30 +1 +0 +0$", printed, re.MULTILINE)
    assert f"exact: mine is aime25 {rows[4]['id']} (overlap 1.00)" in printed
    assert "1 training rows give away an evaluation problem" in printed


def test_without_a_choice_it_compares_with_every_set_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"problem": QUESTION}) + "\n")
    assert main(["data", "check", str(mine), "--data", str(DATA)]) == 0
    printed = capsys.readouterr().out
    compared = re.findall(r"^(\w+) +\d+ +0 +0 +0$", printed, re.MULTILINE)
    assert compared == ["aime24", "aime25", "amc23"]
    assert "not compared with math500, amc, minerva, olympiadbench, gsm8k-test, hmmt25, brumo25, cmimc25:" in printed
    assert main(["data", "check", str(mine), "--data", str(tmp_path)]) == 2
    assert "holds no eval_aime24" in capsys.readouterr().err
