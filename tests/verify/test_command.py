"""`r3 verify`: lines in, lines out. Covers r3.commands.verify."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from r3.commands.verify import judge_cases
from r3.verify import VerifierError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prediction": r"so \boxed{4}", "gold": "4"},
    {"id": "b", "prediction": "4", "gold": "4"},
    {"id": 3, "prediction": "4", "gold": "4", "kind": "answer"},
    {"id": "d", "prediction": r"\boxed{(x+1)^2}", "gold": "x^2+2x+1", "kind": "boxed_text"},
    {"id": "e", "prediction": "\ud800", "gold": 4},
]


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_verdicts_come_in_order(tmp_path: Path, batch: int) -> None:
    out = io.StringIO()
    counts = judge_cases(written(tmp_path, ROWS), out, batch=batch)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["id"], line["correct"], line["reason"]) for line in lines] == [
        ("a", True, "match"),
        ("b", False, "no box"),
        (3, True, "match"),
        ("d", True, "match"),
        ("e", False, "no box"),
    ]
    assert all(set(line) == {"id", "correct", "reason", "seconds"} for line in lines)
    assert counts == {"match": 3, "no box": 2}


def test_bare_answers_when_asked_for(tmp_path: Path) -> None:
    out = io.StringIO()
    judge_cases(written(tmp_path, ROWS), out, bare=True)
    assert [json.loads(line)["correct"] for line in out.getvalue().splitlines()] == [True, True, True, True, False]


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ROWS[0]) + "\n"))
    judge_cases("-")
    assert json.loads(capsys.readouterr().out)["correct"] is True


@pytest.mark.parametrize(("text", "fix"), [("{", "line 1: not JSON"), ('{"id": 1}', "id, prediction and gold")])
def test_bad_lines_are_named(tmp_path: Path, text: str, fix: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(VerifierError, match=fix):
        judge_cases(str(path), io.StringIO())


def test_a_missing_file_is_named() -> None:
    with pytest.raises(VerifierError, match="give a JSONL file"):
        judge_cases("/no/such/file", io.StringIO())
