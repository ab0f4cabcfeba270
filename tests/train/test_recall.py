"""What a step asks of the buffer."""

from __future__ import annotations

from pathlib import Path

from r3.buffer import SampleBuffer
from r3.method.replay import choose_replay
from r3.method.settings import ReplaySettings
from r3.train.recall import past_samples
from tests.method.makers import REFLECTION, make_group, make_sample


def test_failures_in_reflection_do_not_hide_those_under_the_plain_prompt(tmp_path: Path) -> None:
    """A query that was hard, was reflected upon in vain, and is solved by now: its newest failures are reflection's."""
    settings = ReplaySettings(candidates=4, k=2)
    with SampleBuffer(tmp_path / "samples.sqlite") as buffer:
        buffer.add([make_sample(False, tokens=[1, 2]), make_sample(False, tokens=[1, 3])])
        buffer.add([make_sample(False, tokens=[2, i], context=REFLECTION) for i in range(8)])
        group = make_group([make_sample(True), make_sample(True)])
        history = past_samples(buffer, [group], settings, version=5)
        joined = choose_replay(group, history[group.query.id], settings, policy_version=5)
    assert {tuple(sample.tokens.tolist()) for sample in joined.samples} == {(1, 2), (1, 3)}


def test_successes_of_reflection_are_found(tmp_path: Path) -> None:
    settings = ReplaySettings()
    with SampleBuffer(tmp_path / "samples.sqlite") as buffer:
        buffer.add([make_sample(True, tokens=[3, 3], context=REFLECTION)])
        group = make_group([make_sample(False), make_sample(False)])
        history = past_samples(buffer, [group], settings, version=5)
    assert [sample.context.kind for sample in history[group.query.id]] == ["reflection"]


def test_nothing_is_read_for_solve_all_groups_where_failures_are_not_replayed(tmp_path: Path) -> None:
    with SampleBuffer(tmp_path / "samples.sqlite") as buffer:
        buffer.add([make_sample(False, tokens=[1, 2])])
        group = make_group([make_sample(True), make_sample(True)])
        assert past_samples(buffer, [group], ReplaySettings(failures=False), version=5) == {}
