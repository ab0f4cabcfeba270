"""Queries asked before their turn in a run: who they are, what comes of them, and that a resumed run asks the same."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from r3.method.settings import MethodSettings
from r3.samples import Group, Query
from r3.train.stream import QueryStream, Revisits
from tests.method.makers import make_group, make_sample
from tests.train.test_train import contents
from tests.train.tiny import ROOT, command, overrides, read_metrics, run_r3


def revisits(method: str = "exgrpo", queries: int = 8, **more: Any) -> Revisits:
    settings = MethodSettings.model_validate({"name": method, "revisit": more}).revisit
    stream = QueryStream([Query(f"q{i}", "1+1=") for i in range(queries)], seed=1, epochs=None)
    return Revisits(stream, settings, seed=1)


def answered(batch: list[tuple[Query, int]], again: frozenset[int], right: dict[str, int]) -> list[Group]:
    """Groups of four, of which so many are right."""
    return [
        make_group(
            [make_sample(i < right[query.id], query_id=query.id, epoch=epoch) for i in range(4)],
            query_id=query.id,
            revisited=place in again,
        )
        for place, (query, epoch) in enumerate(batch)
    ]


def rights(batch: list[tuple[Query, int]], *right: int) -> dict[str, int]:
    return {query.id: count for (query, _), count in zip(batch, right, strict=True)}


def test_nothing_is_asked_again_before_enough_is_right() -> None:
    """A share of 0.35 is not above 0.35; the batch that is fills the pool, and those before it do not."""
    asked = revisits(queries=20)
    batch, again = asked.take(5, step=1)
    counts = asked.learn(answered(batch, again, rights(batch, 1, 1, 1, 2, 2)), step=1)
    assert (again, asked.started, counts["revisit/pool"]) == (frozenset(), False, 0)
    batch, again = asked.take(5, step=2)
    counts = asked.learn(answered(batch, again, rights(batch, 4, 0, 1, 2, 1)), step=2)
    assert (again, asked.started, counts) == (
        frozenset(), True, {"revisit/asked": 0, "revisit/pool": 3, "revisit/retired": 1},
    )  # fmt: skip
    later, again = asked.take(5, step=3)
    assert again == {3, 4}  # ⌊0.5 · 5⌋
    assert {later[i][0].id for i in again} <= {batch[i][0].id for i in (2, 3, 4)}
    assert asked.learn(answered(later, again, {f"q{i}": 0 for i in range(20)}), step=3)["revisit/asked"] == 2
    assert asked.started  # for good


def test_solved_queries_leave_from_the_next_epoch_on_while_a_batch_of_others_is_left() -> None:
    asked = revisits(start_at=None, share=0.1)
    right = {f"q{i}": 4 if i < 4 else 0 for i in range(8)}
    first = []
    for step in (1, 2):
        batch, again = asked.take(4, step=step)
        asked.learn(answered(batch, again, right), step=step)
        first += [query.id for query, _ in batch]
    assert sorted(first) == sorted(right)  # the first epoch is whole
    assert set(asked.retired) == {f"q{i}" for i in range(4)}
    for step in (3, 4):
        batch, again = asked.take(4, step=step)
        assert sorted(query.id for query, _ in batch) == ["q4", "q5", "q6", "q7"]
        asked.learn(answered(batch, again, right), step=step)
    batch, _ = asked.take(5, step=5)  # more than are left: none is left out
    assert len(batch) == 5


def test_a_query_is_asked_again_at_most_so_often_and_not_while_it_cools_down() -> None:
    asked = revisits("prompt-replay", queries=200, cooldown=2, jitter=0.0, max_reuse=2)
    right, when = dict.fromkeys((f"q{i}" for i in range(200)), 0), []
    for step in range(1, 30):
        batch, again = asked.take(2, step=step)
        if step == 1:
            right[batch[0][0].id] = 2
        when += [step] if again else []
        asked.learn(answered(batch, again, right), step=step)
    assert when == [4, 7]


def test_with_it_off_queries_come_in_their_turn() -> None:
    asked, alone = revisits("grpo"), QueryStream([Query(f"q{i}", "1+1=") for i in range(8)], seed=1, epochs=None)
    for step in range(1, 9):
        batch, again = asked.take(3, step=step)
        assert batch == alone.take(3)
        assert asked.learn(answered(batch, again, dict.fromkeys((f"q{i}" for i in range(8)), 2)), step=step) == {
            "revisit/asked": 0, "revisit/pool": 0, "revisit/retired": 0,
        }  # fmt: skip


@pytest.mark.parametrize("method", ["exgrpo", "prompt-replay"])
def test_killed_and_resumed_the_same_queries_are_asked_again(tmp_path: Path, method: str) -> None:
    more = {"train__epochs": 4, "run__checkpoint_every": 3, "reward__length_bonus": "auto", "method": method}
    more |= {"method__revisit__start_at": "null", "method__revisit__min_rate": 0, "method__revisit__cooldown": 1}
    run_r3("train", "--quiet", *overrides(tmp_path, **more))
    whole = read_metrics(tmp_path / "run")
    assert sum(line.get("revisit/asked", 0) for line in whole) > 2
    run = tmp_path / "killed" / "run"
    process = subprocess.Popen(
        command("train", "--quiet", *overrides(tmp_path, **more, run__dir=run)), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not any(run.glob("checkpoints/step-000003")):
        os.sched_yield()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    run_r3("train", "--quiet", "--resume", run)
    assert contents(tmp_path / "killed") == contents(tmp_path)
