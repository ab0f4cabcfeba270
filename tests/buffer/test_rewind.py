"""Eviction, settling and exact rewinds, of samples and of notes, against a model that keeps whole copies of its past.

Covers r3.buffer.totals, r3.buffer.notes.
"""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.buffer import Attempts, SampleBuffer, SampleBufferError
from r3.buffer.damage import salvage
from r3.samples import Context, Joins, Sample
from tests.buffer.helpers import make_sample, rounded, state

QUERIES = ["a", "b", "c"]


@dataclass
class Present:
    """All that matters of the buffer at one moment, kept the plain way."""

    alive: list[tuple[int, Sample]] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    attempts: list[tuple[str, str, bool]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    given: int = 0
    step: int | None = None
    version: int | None = None


class Model:
    """The buffer's rules, one sample at a time, with a copy of the present at the end of every step."""

    def __init__(self, per_query: int, total: int) -> None:
        self.per_query, self.total = per_query, total
        self.now = Present()
        self.past: dict[int, Present] = {}

    def add(self, samples: list[Sample]) -> list[int]:
        ids = []
        for sample in samples:
            self.now.given += 1
            ids.append(self.now.given)
            self.now.alive.append((self.now.given, sample))
            self.now.step = sample.step
            self.now.version = max(self.now.version or 0, sample.policy_version)
            if sample.query_id not in self.now.seen:
                self.now.seen.append(sample.query_id)
            if sample.outcome is not None:
                self.now.attempts.append((sample.query_id, sample.context.kind, sample.outcome))
        for query in QUERIES:
            self._shrink([entry for entry in self.now.alive if entry[1].query_id == query], self.per_query)
        self._shrink(list(self.now.alive), self.total)
        assert self.now.step is not None
        self.past[self.now.step] = copy.copy(self.now)
        for name in ("alive", "evicted", "attempts", "seen"):
            setattr(self.now, name, list(getattr(self.now, name)))
        return ids

    def _shrink(self, scope: list[tuple[int, Sample]], limit: int) -> None:
        while len(scope) > limit:
            right = [entry for entry in scope if entry[1].outcome]
            wrong = [entry for entry in scope if not entry[1].outcome]
            victim = right[0] if len(right) > len(wrong) else wrong[0]
            scope.remove(victim)
            self.now.alive.remove(victim)
            self.now.evicted.append(victim[0])

    def forget_after(self, step: int) -> None:
        self.past = {then: present for then, present in self.past.items() if then <= step}
        self.now = copy.deepcopy(self.past[max(self.past)]) if self.past else Present()

    def settle(self, step: int) -> None:
        gone = set(max((p for p in self.past.items() if p[0] <= step), default=(0, Present()))[1].evicted)
        for present in [self.now, *self.past.values()]:
            present.evicted = [number for number in present.evicted if number not in gone]

    def state(self) -> tuple[Any, ...]:
        now, samples = self.now, [sample for _, sample in self.now.alive]
        outcomes = [sample.outcome for sample in samples]
        ledger = []
        for context in ("plain", "reflection", None):
            tried: dict[str, Attempts] = {}
            for query, kind, outcome in now.attempts:
                if context in (kind, None):
                    n, solved = tried.get(query, (0, 0))
                    tried[query] = Attempts(n + 1, solved + outcome)
            ledger.append(tried)
        counts = (
            len(samples),
            outcomes.count(True),
            outcomes.count(False),
            outcomes.count(None),
            sum(sample.truncated for sample in samples),
            sum(map(len, samples)),
            len(now.evicted),
            len(now.seen),
            min((sample.step for sample in samples), default=None),
            now.step,
            now.version,
        )
        return {number: rounded(sample) for number, sample in now.alive}, ledger, counts


batches = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(QUERIES)), min_size=1, max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), batches),
        st.tuples(st.just("forget"), st.integers(-1, 12)),
        st.tuples(st.just("settle"), st.integers(0, 12)),
    ),
    max_size=14,
)


@given(actions, st.integers(1, 5), st.integers(1, 8))
def test_any_run_equals_the_model(actions, per_query, total):
    model, settled, step = Model(per_query, total), -1, 0
    with SampleBuffer(":memory:", per_query=per_query, total=total) as buffer:
        for action, *details in actions:
            if action == "add":
                step += details[0]
                samples = [make_sample(seed, query, length=1 + seed % 5, step=step) for seed, query in details[1]]
                assert buffer.add(samples) == model.add(samples)
            elif action == "settle":
                buffer.settle(details[0])
                model.settle(details[0])
                settled = max(settled, details[0])
            elif details[0] < settled:
                with pytest.raises(SampleBufferError, match="cannot rewind"):
                    buffer.forget_after(details[0])
            else:
                buffer.forget_after(details[0])
                model.forget_after(details[0])
                step = max(model.now.step or 0, min(step, details[0]), 0)
            assert state(buffer, QUERIES) == model.state()
        assert buffer.check() == []


@given(st.lists(batches, min_size=2, max_size=8), st.data())
def test_rewind_and_repeat_equals_the_uninterrupted_run(steps, data):
    """As after a crash: rewind to the last checkpoint, then the same steps again, ids included."""
    groups = [
        [make_sample(seed, query, length=1 + seed % 5, step=step) for seed, query in batch]
        for step, batch in enumerate(steps)
    ]
    checkpoint = data.draw(st.integers(-1, len(groups) - 1))
    settled = data.draw(st.integers(-1, checkpoint))
    with (
        SampleBuffer(":memory:", per_query=2, total=4) as straight,
        SampleBuffer(":memory:", per_query=2, total=4) as broken,
    ):
        for step, samples in enumerate(groups):
            straight.add(samples)
            broken.add(samples)
            if step == settled:
                straight.settle(step)
                broken.settle(step)
        broken.forget_after(checkpoint)
        for samples in groups[checkpoint + 1 :]:
            broken.add(samples)
        assert state(broken, QUERIES) == state(straight, QUERIES)
        assert broken.check() == []


def test_one_add_of_several_steps_rewinds_between_them():
    samples = [make_sample(seed, step=seed // 3) for seed in range(12)]
    with (
        SampleBuffer(":memory:", per_query=3) as together,
        SampleBuffer(":memory:", per_query=3) as apart,
    ):
        together.add(samples)
        for step in range(4):
            apart.add(samples[3 * step : 3 * step + 3])
        assert state(together, ["q"]) == state(apart, ["q"])
        assert together.forget_after(1) == apart.forget_after(1)
        assert state(together, ["q"]) == state(apart, ["q"])


def test_rewind_says_what_it_did_and_survives_reopening(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path, per_query=2) as buffer:
        for step in range(3):
            buffer.add([make_sample(2 * step, step=step), make_sample(2 * step + 1, "other", step=step)])
        buffer.add([make_sample(9, "new", step=3)])
    with SampleBuffer(path, per_query=2) as buffer:
        assert buffer.stats().evicted == 2
        assert buffer.forget_after(1) == (3, 2)
        assert buffer.stats().evicted == 0
        assert buffer.forget_after(1) == (0, 0)
        assert buffer.add([make_sample(10, step=2)]) == [5]


def test_a_rare_success_outlives_any_number_of_failures():
    with SampleBuffer(":memory:", per_query=4) as buffer:
        buffer.add([make_sample(0, outcome=True)])
        for step in range(20):
            buffer.add([make_sample(seed, outcome=False, step=step) for seed in range(4)])
        kept = buffer.history(["q"])["q"]
        assert [(sample.outcome, sample.id) for sample in kept] == [(False, 81), (False, 80), (False, 79), (True, 1)]


def test_the_total_limit_takes_the_oldest_of_the_more_common_outcome():
    outcomes = {"a": True, "b": False, "c": True, "d": True}
    with SampleBuffer(":memory:", per_query=None, total=3) as buffer:
        buffer.add([make_sample(1, query, outcome=outcome) for query, outcome in outcomes.items()])
        assert [query for query, samples in buffer.history(outcomes).items() if not samples] == ["a"]


def test_settling_refuses_earlier_rewinds_and_reuses_space(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path, per_query=8) as buffer:
        for step in range(30):
            buffer.add([make_sample(step * 8 + i, step=step, length=3_000, outcome=False) for i in range(8)])
            assert buffer.settle(step) == (8 if step else 0)
        with pytest.raises(SampleBufferError, match="rewind to step 29 or later"):
            buffer.forget_after(28)
        assert buffer.forget_after(29) == (0, 0)
        assert buffer.stats().samples == 8
    assert path.stat().st_size < 3 * 8 * 3_000 * 9  # room for three steps, not thirty


def test_reflection_contexts_keep_what_they_showed():
    with SampleBuffer(":memory:") as buffer:
        (shown,) = buffer.add([make_sample(1, outcome=False)])
        buffer.add([make_sample(2, context=Context("reflection", shown))])
        assert buffer.history(["q"], context="reflection")["q"][0].context.shown == shown


# `r3.buffer.notes`: how often answers joined, first log-probs, late pairs; rewound, exported and salvaged with all.


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
