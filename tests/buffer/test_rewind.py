"""Eviction, settling and exact rewinds, against a model that keeps whole copies of its past.

Covers r3.buffer.totals.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.buffer import Attempts, SampleBuffer, SampleBufferError
from r3.samples import Context, Sample
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
