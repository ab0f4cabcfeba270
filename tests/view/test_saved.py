"""What a real run saves for the pages agrees with its buffer and with the method.

Covers r3.view.steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from r3 import SampleBuffer
from r3.run import RunFiles
from r3.view.runs import open_runs
from r3.view.steps import group_view, peaks


def rows(run: Path) -> Iterator[dict[str, Any]]:
    rollouts = RunFiles(run).rollouts
    for step in rollouts.steps():
        yield from rollouts.read(step)


def test_ids_lead_to_the_same_sample_in_the_buffer(finished: Path) -> None:
    with SampleBuffer.open_reader(finished / "buffer.sqlite") as buffer:
        for row in rows(finished):
            found = buffer.find([row["id"]])
            assert found[row["id"]].tokens.tolist() == row["tokens"]
            if "attempt" in row:
                shown = buffer.find([row["shown"]])[row["shown"]]
                assert (shown.step, shown.verdict) == (row["attempt"]["step"], row["attempt"]["verdict"])


def test_ratios_are_those_of_the_update(finished: Path) -> None:
    """On-policy samples have 1 but for rounding; replayed ones do not; samples that were not trained on have none."""
    aged = []
    for row in rows(finished):
        if row["advantage"] == 0 or row["drawn_in"] != row["context"]:
            assert isinstance(row["ratios"], float), "null comes back as NaN"
            continue
        assert len(row["ratios"]) == len(row["tokens"])
        if row["origin"] == "fresh":
            assert row["ratios"] == pytest.approx([1.0] * len(row["tokens"]), abs=5e-3)
        else:
            aged += row["ratios"]
    assert max(abs(math.log(ratio)) for ratio in aged) > 0.005


def test_the_pages_ranking_is_the_reward_that_was_paid(finished: Path) -> None:
    run = open_runs([finished])[0]
    seen = 0
    for step in run.tables.steps():
        for number in range(4):  # the plain groups
            ranking = group_view(run, step, number)["ranking"]
            ranked = [point for point in ranking["points"] if point["rank"] is not None]
            seen += len(ranked)
            for one in ranked:
                for other in ranked:
                    if one["score"] > other["score"]:
                        assert one["reward"] > other["reward"]
                assert one["score"] == sum(i == one["sample"] for i, _ in ranking["beats"])
    assert seen


def test_peaks_are_the_most_undecided_tokens() -> None:
    assert peaks([0.1, 3.0, 0.2, 2.0, 0.0], 0.4) == [1, 3]
    assert peaks([1.0], 0.2) == [0]
