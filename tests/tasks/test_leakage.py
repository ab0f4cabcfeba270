"""Leaks that are planted are found, with their kind; the index finds what comparing every pair finds."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.cli import main
from r3.tasks.datasets import load_set
from r3.tasks.leakage import Leak, Problem, check, find_leaks, problems_of

DATA = Path(__file__).parents[1] / "data"
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
