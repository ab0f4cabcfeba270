"""`r3.buffer.notes`: how often answers joined, first log-probs, late pairs; rewound, exported and salvaged with all."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.buffer import SampleBuffer
from r3.buffer.damage import salvage
from r3.samples import Joins, Sample
from tests.buffer.helpers import make_sample

TEXTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=4)


def answer(query: str, text: int, step: int = 0) -> Sample:
    return make_sample(7 * text, query, tokens=[text, 1], logprobs=[-1.0, -2.0], entropies=None, step=step)


def plain(joins: dict[str, dict[bytes, Joins]]) -> dict[tuple[str, bytes], tuple[int, list[float] | None]]:
    return {
        (query, text): (past.times, None if past.logprobs is None else past.logprobs.tolist())
        for query, texts in joins.items()
        for text, past in texts.items()
    }


@given(st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=6), st.data())
def test_counts_and_first_log_probs_are_those_of_a_naive_list_also_after_a_rewind(
    steps: Sequence[tuple[list[tuple[str, int]], bool]], data: st.DataObject
) -> None:
    rewound_to = data.draw(st.integers(0, len(steps)))
    with SampleBuffer(":memory:") as buffer:
        for step, (texts, kept) in enumerate(steps, 1):
            buffer.add([answer(query, 0, step) for query in "ab"])
            samples = [answer(*text) for text in texts]
            buffer.note_joined(step, samples)
            if kept:
                buffer.keep_logprobs(step, [(s, np.float32([-step, -0.1])) for s in samples])
        buffer.forget_after(rewound_to)
        expected: dict[tuple[str, bytes], tuple[int, list[float] | None]] = {}
        for step, (texts, kept) in enumerate(steps[:rewound_to], 1):
            for query, text in texts:
                key = query, answer(query, text).fingerprint
                times, first = expected.get(key, (0, None))
                now = [float(-step), float(np.float32(-0.1))] if kept else None
                expected[key] = times + 1, first if first is not None else now
        assert plain(buffer.joins(["a", "b"])) == expected
        for below in (1, 2):
            stored = buffer.history(["a"], joined_below=below)["a"]
            used_up = expected.get(("a", answer("a", 0).fingerprint), (0, None))[0] >= below
            assert len(stored) == (0 if used_up else rewound_to)


@pytest.mark.parametrize("way", ["a.jsonl", "a.parquet", "salvage", "copy"])
def test_they_go_wherever_the_buffer_goes(tmp_path: Path, way: str) -> None:
    with SampleBuffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add([answer("a", 0, 1), answer("b", 1, 1)])
        for step in (1, 2):
            buffer.note_joined(step, [answer("a", 0)])
        buffer.keep_logprobs(2, [(answer("a", 0), np.float32([-0.3, -0.7]))])
        buffer.note_late_pairs(1, [(1.5, 2), (0.0, 1)])
        buffer.note_late_pairs(2, [(4.0, 4)])
        before = plain(buffer.joins(["a", "b"]))
        if way == "salvage":
            salvage(buffer.path, tmp_path / "other.sqlite")
        elif way == "copy":
            buffer.copy(tmp_path / "other.sqlite")
        else:
            buffer.export(tmp_path / way)
    with SampleBuffer(tmp_path / "other.sqlite") as other:
        if way.startswith("a."):
            other.import_(tmp_path / way)
        assert plain(other.joins(["a", "b"])) == before
        assert other.late_pairs(4) == [(4.0, 4)]
        assert other.late_pairs(5) == [(4.0, 4), (1.5, 2), (0.0, 1)]  # whole steps, the newest first
        other.forget_after(1)
        assert other.late_pairs(5) == [(1.5, 2), (0.0, 1)]
        assert before[("a", answer("a", 0).fingerprint)][0] == 2


def test_a_file_of_an_earlier_version_learns_to_count(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add([answer("a", 0, 1)])
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE joined")
        db.execute("DROP TABLE late_pairs")
        db.commit()
    with SampleBuffer.open_reader(path) as reader:
        assert reader.export(tmp_path / "a.jsonl") == 1
    with SampleBuffer(path) as buffer:
        buffer.note_joined(1, [answer("a", 0)])
        assert [past.times for past in buffer.joins(["a"])["a"].values()] == [1]
