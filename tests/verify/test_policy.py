"""The policy page, row by row, and agreement with the public cases.

Covers r3.verify.maths, r3.verify.symbolic.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from r3.verify import Case, MathVerifier

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"

# Public cases that we answer otherwise, by id, each with the reason. There is none.
DISAGREEMENTS: dict[str, str] = {}

# What we answer where the sources made a choice of their own: one answer, or those of the named golds.
CHOICES: dict[str, bool | dict[tuple[str, str], bool]] = {
    "several boxes": False,  # only the last box counts, of the gold too
    "gsm8k #### format": False,  # no box
    "box required": False,
    "[..] answer format": {("[-3]", "-3"): True, ("[45]", "45"): True},  # in a box, brackets round one value group it
    "inline math broken over lines": False,  # no box
    "rounding": {("3.14159", "3.1416"): True, (r"\frac{100}{3}", "33.3"): True},  # at the gold's own precision
    "nonsense equality chain": False,  # every part must hold
    "percent sign dropped": False,
    "percent x100": False,
    "tuple as set": False,
    "set vs tuple": False,
    "list vs tuple": True,  # in the same order
    "ordered list": True,  # a bare list is unordered
    "unordered list": True,
    "comma-space inside number": False,
    "decimal comma": False,
    "|z| bound vs real interval": True,
    "broken EOS token": True,  # what follows the box does not matter
    "only box is inside <think>": True,
    "decimal vs fraction judged by string match upstream": True,
}


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


def cases(chosen: Literal["public", "policy", "ours"]) -> list[dict[str, Any]]:
    return [row for row in rows_of("verifier_cases.jsonl") if row["set"] == chosen]


def completion(row: dict[str, Any]) -> str:
    return f"\\boxed{{{row['prediction']}}}" if row["kind"] == "answer" else str(row["prediction"])


def test_agreement_with_the_public_cases(verifier: MathVerifier) -> None:
    rows = [row for row in cases("public") if row["kind"] != "unboxed_text"]
    verdicts = verifier.verify_many((completion(row), row["gold"]) for row in rows)
    wrong = {
        row["id"]: verdict for row, verdict in zip(rows, verdicts, strict=True) if verdict.right != row["expected"]
    }
    assert not [name for name, verdict in wrong.items() if verdict.right], "a wrong answer was called right"
    assert set(wrong) == set(DISAGREEMENTS)
    assert len(wrong) <= 0.01 * len(rows)


def test_agreement_with_tricky_and_hostile_answers(verifier: MathVerifier, strict_verifier: MathVerifier) -> None:
    wrong = []
    for judge, bombs in ((verifier, False), (strict_verifier, True)):
        rows = [row for row in cases("ours") if (row["kind"] == "bomb") is bombs]
        verdicts = judge.verify_many((completion(row), row["gold"]) for row in rows)
        wrong += [(row["id"], v) for row, v in zip(rows, verdicts, strict=True) if v.right != row["expected"]]
    assert not wrong


def test_an_answer_in_many_spellings_and_what_only_looks_like_it(verifier: MathVerifier) -> None:
    rows = rows_of("spellings.jsonl")
    verdicts = verifier.verify_many((f"\\boxed{{{row['answer']}}}", row["gold"]) for row in rows)
    wrong = [
        (row, verdict.reason) for row, verdict in zip(rows, verdicts, strict=True) if verdict.right != row["right"]
    ]
    assert not wrong


def test_text_without_a_box_is_wrong(verifier: MathVerifier) -> None:
    rows = [row for row in cases("public") if row["kind"] == "unboxed_text"]
    verdicts = verifier.verify_many([(row["prediction"], row["gold"]) for row in rows])
    assert Counter(verdict.reason for verdict in verdicts) == {"no box": len(rows)}


def test_cases_of_choice_follow_our_policy(verifier: MathVerifier) -> None:
    rows = cases("policy")
    verdicts = verifier.verify_many((completion(row), row["gold"]) for row in rows)
    for row, verdict in zip(rows, verdicts, strict=True):
        choice = CHOICES[row["policy"]]
        ours = choice if isinstance(choice, bool) else choice.get((row["prediction"], row["gold"]), False)
        assert verdict.right == ours, (row["policy"], row["prediction"], row["gold"], verdict)


def documented() -> Iterator[Any]:
    """The example rows of the page: every table whose header has a gold and a verdict."""
    header: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not header:
            header = cells
        elif "gold" in header and not set(line) <= set("|-"):
            row = dict(zip(header, cells, strict=True))
            text = row.get("response") or "`\\boxed{" + row["answer"].strip("`") + "}`"
            yield pytest.param(text.strip("`"), row["gold"].strip("`"), row["verdict"], row.get("reason"), id=line[:60])


@pytest.mark.parametrize(("response", "gold", "verdict", "reason"), list(documented()))
def test_the_page_is_true(verifier: MathVerifier, response: str, gold: str, verdict: str, reason: str | None) -> None:
    found = verifier.verify(response, gold)
    assert found.right == {"right": True, "wrong": False}[verdict], found
    assert reason in (None, found.reason)


def test_the_page_has_its_examples() -> None:
    assert len(list(documented())) > 100


def test_truncated_is_wrong_whatever_it_holds(verifier: MathVerifier) -> None:
    verdict = verifier.verify(r"\boxed{4}", "4", truncated=True)
    assert (verdict.right, verdict.reason) == (False, "truncated")


def test_a_batch_keeps_its_order_and_counts_reasons() -> None:
    batch = [Case(rf"\boxed{{{i}}}", str(i - i % 2)) for i in range(50)] + [Case(r"\boxed{(x+1)^2}", "x^2+2x+1")] * 3
    with MathVerifier() as verifier:
        verdicts = verifier.verify_many([*batch, Case(r"\boxed{1}", "1", truncated=True)])
        assert [v.right for v in verdicts] == [i % 2 == 0 for i in range(50)] + [True] * 3 + [False]
        assert verifier.counts() == {"match": 28, "different": 25, "truncated": 1}


# No two of these are equal: no rule may let one pass for another.
GOLDS = [
    "1", "-1", "2", "1/2", "0.25", r"\frac{14}{3}", r"\sqrt{2}", r"\pi", r"2\pi", "x", "y", "2x", "x^2", "x+1", "50\\%",
    "(1,2)", "(2,1)", "[1,2]", "[1,2)", "1,2,3", r"\{1,2,3,4\}", "x<1", "x>1", r"x\leq 1", r"\text{Even}",
    r"\text{odd}", "A",
    r"\begin{pmatrix}1\\2\end{pmatrix}", r"(-\infty,1)\cup(1,3)", "1+2i", "2x+y=1", r"\infty", r"-\infty",
    "12:30", "101_2",
]  # fmt: skip


def test_no_gold_passes_for_another(verifier: MathVerifier) -> None:
    pairs = [(answer, gold) for answer in GOLDS for gold in GOLDS]
    verdicts = verifier.verify_many([(f"\\boxed{{{answer}}}", gold) for answer, gold in pairs])
    confused = [pair for pair, v in zip(pairs, verdicts, strict=True) if v.right != (pair[0] == pair[1])]
    assert not confused
