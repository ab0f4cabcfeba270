"""A step's metrics in real runs: the ranking's, against pairs counted one by one; the alarm of a failing judge.

Covers r3.train.sampler, r3.train.step_metrics.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.run import RunFiles
from r3.samples import Sample
from tests.train.tiny import overrides, read_metrics

LIMIT, PEAKS = 12, 0.25


def in_order(samples: list[Sample]) -> tuple[float, int]:
    """How many pairs of a right and a wrong answer SERR orders rightly by their first half-limit of tokens."""
    late = []
    for sample in samples:
        assert sample.entropies is not None
        if len(sample) > LIMIT // 2:
            seen = sorted(map(float, sample.entropies[: LIMIT // 2]))
            most = max(1, int(PEAKS * len(seen)))
            late.append((sum(seen[-most:]) / most, sum(seen) / len(seen), bool(sample.outcome)))
    scores = [sum(peak > p and mean < m for p, m, _ in late) for peak, mean, _ in late]
    pairs = [(scores[i], scores[j]) for i, (*_, a) in enumerate(late) for j, (*_, b) in enumerate(late) if a and not b]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs), len(pairs)


def test_the_rankings_order_is_measured_in_training(tmp_path: Path) -> None:
    settings = overrides(tmp_path, train__epochs=2, rollout__group_size=8, method__reflection="off")
    assert main(["train", "--quiet", *settings]) == 0
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    with SampleBuffer.open_reader(tmp_path / "run" / "buffer.sqlite") as buffer:
        history = buffer.history([f"q{i}" for i in range(12)])
    for line in lines:
        counted = [
            in_order([sample for sample in samples if sample.step == line["step"]]) for samples in history.values()
        ]
        assert line["ranking/pairs"] == sum(pairs for _, pairs in counted)
        # The buffer rounds entropies to half precision, which may tie a pair or two.
        assert line["ranking/pairs_in_order"] == pytest.approx(sum(ordered for ordered, _ in counted), abs=1)
        if line["ranking/pairs"]:
            assert line["ranking/auc"] == line["ranking/pairs_in_order"] / line["ranking/pairs"]
    assert sum(line["ranking/pairs"] for line in lines) > 20


def test_a_judge_that_fails_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers that nobody found wrong count as wrong: a person should hear of it, not only find it in the metrics."""
    judge = {"task__verifier": "tests.tasks.test_files.raises", "task__caged": "true", "train__steps": 1}
    assert main(["train", "--quiet", *overrides(tmp_path, **judge)]) == 0
    (line,) = [line for line in read_metrics(tmp_path / "run") if line["step"] == 1]
    assert line["verify/error"] > 0
    assert f"step 1: the verifier gave up on {line['verify/error']:.0f} of" in caplog.text


def test_successes_are_counted_by_where_they_come_from(tmp_path: Path) -> None:
    """Against the rollouts, in which every sample of every group stands."""
    more = {"method__reflection__at_once": "true", "method__reflection__tau": 0.9, "run__rollouts_groups": 100}
    assert main(["train", "--quiet", *overrides(tmp_path, train__epochs=3, **more)]) == 0
    total: Counter[str] = Counter()
    for line in read_metrics(tmp_path / "run")[1:]:
        rows = list(RunFiles(tmp_path / "run").rollouts.read(line["step"]))
        fresh = [row for row in rows if row["origin"] == "fresh"]
        plain = [row for row in fresh if row["context"] == "plain"]
        reflected = [row for row in fresh if row["context"] == "reflection"]
        replayed = [row for row in rows if row["origin"] == "replayed"]
        asked_twice = {row["query"] for row in reflected}
        same = [row for row in plain if row["query"] in asked_twice]
        expected = {
            "successes/fresh": right(plain),
            "successes/reflection": right(reflected),
            "successes/replayed": right(replayed),
            "lift/tried/plain": len(same),
            "lift/right/plain": right(same),
            "lift/tried/reflection": len(reflected),
            "lift/right/reflection": right(reflected),
        }
        assert {name: line[name] for name in expected} == expected
        for name, rows_of in (("yield/plain", plain), ("yield/reflection", reflected)):
            tokens = sum(len(row["tokens"]) for row in rows_of)
            assert line[name] == (pytest.approx(1000 * right(rows_of) / tokens) if tokens else None)
        total.update(expected)
    assert all(total.values()), total


def right(rows: list[dict[str, Any]]) -> int:
    return sum(row["outcome"] for row in rows)


def test_peak_memory_is_the_process_s_own_whoever_started_it() -> None:
    child = "from r3.train.step_metrics import peak_memory_gb; print(peak_memory_gb())"
    parent = f"import subprocess, sys; held = b'x' * 2_000_000_000; subprocess.run([sys.executable, '-c', {child!r}])"
    told = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True).stdout
    assert 0.01 < float(told) < 1.5
