"""The log of responses survives being cut anywhere, and foreign responses find their problems.

Covers r3.evaluate.responses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from r3.errors import RunError, TaskError
from r3.evaluate.responses import Judged, ResponseLog, SavedResponses, read_judged, write_parquet
from r3.samples import Query


def judged(sample: int, **changed: Any) -> Judged:
    fields = {"task": "t", "id": "q", "right": True, "reason": "match", "answer": "1", "tokens": 3, "truncated": False}
    return Judged(sample=sample, **(fields | changed))


TEXTS = ["one", "two\nlines\u2028and more", "a lone \ud800 surrogate and a \x00"]


def test_a_log_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    with ResponseLog(path) as log:
        log.append([(judged(i), text) for i, text in enumerate(TEXTS)])
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        with ResponseLog(path) as log:
            assert set(log.judged) == {("t", "q", i) for i in range(lines)}
            log.append([(judged(i), TEXTS[i]) for i in range(lines, 3)])
        assert path.read_bytes() == whole


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    with ResponseLog(tmp_path / "r.jsonl") as log:
        log.append([(judged(i, answer=None), text) for i, text in enumerate(TEXTS)])
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [row["response"] for row in rows] == TEXTS
    assert read_judged(tmp_path / "r.jsonl") == [judged(i, answer=None) for i in range(3)]
    write_parquet(tmp_path / "r.jsonl", tmp_path / "r.parquet", rows=2)
    table = parquet.read_table(tmp_path / "r.parquet").to_pylist()
    assert [row["response"] for row in table] == [*TEXTS[:2], "a lone ? surrogate and a \x00"]
    assert [(row["sample"], row["right"], row["answer"], row["tokens"]) for row in table] == [
        (i, True, None, 3) for i in range(3)
    ]


def test_damage_before_the_end_is_named_not_repaired(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResponseLog(path) as log:
        log.append([(judged(i), "x") for i in range(3)])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:9], lines[2], b""]))
    with pytest.raises(RunError, match=r"r\.jsonl, line 2: damaged"):
        ResponseLog(path)


QUERIES = {
    "small": [Query("q1", "What is 1 + 1?", "2", {"problem": "What is 1 + 1?"})],
    "large": [
        Query("q1", "What is 1 + 1?", "2", {"problem": "What is 1 + 1?"}),
        Query("q2", "What is 2 + 2?", "4", {"problem": "What is 2 + 2?"}),
    ],
}


def saved(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> SavedResponses:
    path = tmp_path / "saved.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SavedResponses(path, QUERIES, **options)


def test_rows_are_matched_by_id_text_and_task(tmp_path: Path) -> None:
    responses = saved(
        tmp_path,
        {"id": "q2", "response": "first"},
        {"problem": "What  is\n2 + 2?", "completion": "second", "truncated": True},
        {"id": "q2", "response": ["third", "fourth"], "finish_reason": ["length", "stop"], "tokens": [7, 8]},
        {"id": "q1", "response": "of both sets"},
        {"id": "q1", "task": "small", "response": "of one"},
        {"id": "other", "response": "to nobody's question"},
        count_tokens=len,
    )
    found = [(one.task, one.query.id, one.sample, one.text, one.truncated, one.tokens) for one in responses]
    assert found == [
        ("large", "q2", 0, "first", False, 5),
        ("large", "q2", 1, "second", True, 6),
        ("large", "q2", 2, "third", True, 7),
        ("large", "q2", 3, "fourth", False, 8),
        ("small", "q1", 0, "of both sets", False, 12),
        ("large", "q1", 0, "of both sets", False, 12),
        ("small", "q1", 1, "of one", False, 6),
    ]
    assert responses.ignored == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": "x"}, "neither 'id' nor 'problem'"),
        ({"id": "q1"}, "no text in column 'response'"),
        ({"id": "q1", "response": ["a", "b"], "truncated": [True]}, "1 values in 'truncated' for 2 responses"),
        ({"id": "q9", "response": "x"}, "none of its 1 rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        list(saved(tmp_path, row))
