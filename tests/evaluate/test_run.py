"""An evaluation through any engine: every answer judged, kept, resumable at any answer, summed up in the same way.

Covers r3.judging, r3.evaluate.results, r3.evaluate.curves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3.errors import RunError, TaskError
from r3.evaluate.curves import curve_over_k, curve_over_limits, write_curves
from r3.evaluate.passk import pass_at_k
from r3.evaluate.responses import read_judged
from r3.evaluate.results import Results, hard_subset, paper_table
from r3.evaluate.run import Benchmark, evaluate_model
from r3.samples import Query
from r3.verify.judge import PlainJudge, Verdict
from tests.evaluate.scripted import SAMPLING, TOKENIZER, ScriptedEngine, encode, sums


def script(prompt: str, seed: int) -> str:
    """Problem i is right with chance i/6, and wrong answers differ; some answers are too long to be whole."""
    number = int(prompt.split()[1].rstrip("="))
    if seed % 7 == 0:
        return "so long that it is cut"
    return str(number) if seed // 7 % 6 < number else " " * (seed % 5) + "no"


def evaluated(out: Path, engine: ScriptedEngine, *marks: Benchmark, samples: int = 4, **options: Any) -> Results:
    options = {"model": "scripted", "about": {"model": "scripted"}, "seed": 3} | options
    marks = marks or (sums("a", 6), sums("b", 4))
    return evaluate_model(engine, TOKENIZER, marks, SAMPLING, samples, out, encode=encode, **options)


def test_the_numbers_follow_from_the_responses(tmp_path: Path) -> None:
    results = evaluated(tmp_path, ScriptedEngine(script), ks=(1, 2, 4))
    rows = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert len({(row["task"], row["id"], row["sample"]) for row in rows}) == len(rows) == 40
    of_a = [row for row in rows if row["task"] == "a"]
    right = {i: sum(row["right"] for row in of_a if row["id"] == f"a-{i}") for i in range(6)}
    for k in (1, 2, 4):
        expected = sum(pass_at_k(4, count, k) for count in right.values()) / 6
        assert results.tasks["a"].pass_at[k].value == pytest.approx(expected)
    assert results.tasks["a"].mean_tokens == pytest.approx(sum(row["tokens"] for row in of_a) / 24)
    cut = [row for row in of_a if row["truncated"]]
    assert cut
    assert all(not row["right"] and row["answer"] is None and row["tokens"] == SAMPLING.max_tokens for row in cut)
    assert results.tasks["a"].truncated == len(cut) / 24
    assert sum(results.tasks["a"].reasons.values()) == 24
    ones = [task.pass_at[1].value for task in results.tasks.values()]
    assert results.mean.value == pytest.approx(sum(ones) / 2)
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_dict()))


def test_an_interrupted_evaluation_draws_only_what_is_missing(tmp_path: Path) -> None:
    whole = evaluated(tmp_path / "whole", ScriptedEngine(script))
    with pytest.raises(RuntimeError, match="bus"):
        evaluated(tmp_path / "cut", ScriptedEngine(script, fail_after=17))
    assert len(read_judged(tmp_path / "cut" / "responses.jsonl")) == 17
    engine = ScriptedEngine(script)
    resumed = evaluated(tmp_path / "cut", engine)
    assert len(engine.answered) == 40 - 17
    assert resumed.as_dict() == whole.as_dict()
    assert (tmp_path / "cut/results.json").read_bytes() == (tmp_path / "whole/results.json").read_bytes()
    again = ScriptedEngine(script)
    assert evaluated(tmp_path / "cut", again).as_dict() == whole.as_dict()
    assert not again.answered


def test_more_samples_and_tasks_join_and_fewer_can_be_looked_at(tmp_path: Path) -> None:
    few = evaluated(tmp_path, ScriptedEngine(script), sums("a", 6), samples=2)
    engine = ScriptedEngine(script)
    many = evaluated(tmp_path, engine, sums("a", 6), sums("b", 4), samples=5)
    assert len(engine.answered) == 6 * 3 + 4 * 5
    assert many.tasks["a"].samples == many.tasks["b"].samples == 5
    assert evaluated(tmp_path, ScriptedEngine(script), sums("a", 6), samples=2).as_dict() == few.as_dict()


def test_another_evaluation_is_not_continued_by_mistake(tmp_path: Path) -> None:
    evaluated(tmp_path, ScriptedEngine(script))
    with pytest.raises(TaskError, match=r"made otherwise \(seed 3 → 4\); choose another --out"):
        evaluated(tmp_path, ScriptedEngine(script), seed=4)


def test_two_processes_cannot_write_to_one_evaluation(tmp_path: Path) -> None:
    class Intruding(ScriptedEngine):
        def generate(self, *arguments: Any) -> Any:
            with pytest.raises(RunError, match="in use by"):
                evaluated(tmp_path, ScriptedEngine(script))
            return super().generate(*arguments)

    evaluated(tmp_path, Intruding(script))


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    evaluated(tmp_path, ScriptedEngine(script), progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, 40)
    assert told[-1] == (40, 40)
    assert told == sorted(told)


def test_k_beyond_the_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="pass@8 needs k from 1"):
        evaluated(tmp_path, ScriptedEngine(script), ks=(8,))


def test_the_hard_subset_is_what_was_right_at_most_once(tmp_path: Path) -> None:
    evaluated(tmp_path, ScriptedEngine(script), samples=8)
    counts: dict[tuple[str, str], int] = {}
    for one in read_judged(tmp_path / "responses.jsonl"):
        counts[one.task, one.id] = counts.get((one.task, one.id), 0) + one.right
    for at_most in (0, 1, 8):
        hard = hard_subset(tmp_path, at_most)
        assert {(task, i) for task, ids in hard.items() for i in ids} == {
            key for key, right in counts.items() if right <= at_most
        }
    assert 0 < sum(map(len, hard_subset(tmp_path).values())) < 10


def test_an_unfinished_evaluation_has_no_hard_subset(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="bus"):
        evaluated(tmp_path, ScriptedEngine(script, fail_after=9))
    with pytest.raises(TaskError, match="is not finished"):
        hard_subset(tmp_path)
    evaluated(tmp_path, ScriptedEngine(script))
    with pytest.raises(RuntimeError, match="bus"):
        evaluated(tmp_path, ScriptedEngine(script, fail_after=9), samples=8)
    with pytest.raises(TaskError, match="is not finished: from 4 to"):
        hard_subset(tmp_path)


def test_a_judge_that_fails_loses_no_other_verdict(tmp_path: Path) -> None:
    def fails_once(query: Query, completion: str) -> Verdict:
        if query.id == "a-3":
            raise ZeroDivisionError("the judge's own fault")
        return Verdict(True, "match")

    with pytest.raises(ZeroDivisionError):
        evaluated(tmp_path, ScriptedEngine(script), replace(sums("a", 6), judge=PlainJudge(fails_once)), samples=1)
    kept = {one.id for one in read_judged(tmp_path / "responses.jsonl")}
    assert {"a-4", "a-5"} <= kept <= {"a-0", "a-1", "a-2", "a-4", "a-5"}


def test_a_lower_limit_is_as_if_drawn_with_it(tmp_path: Path) -> None:
    results = evaluated(tmp_path / "long", ScriptedEngine(script), samples=6)
    curve = curve_over_limits(results.answers, [2, 4, 6, SAMPLING.max_tokens], k=2, seed=0)
    for limit, found in curve.lines["a"].items():
        shorter = SAMPLING.__class__(max_tokens=limit, stop_tokens=(1,), temperature=0.6)
        drawn = evaluate_model(
            ScriptedEngine(script),
            TOKENIZER,
            [sums("a", 6)],
            shorter,
            6,
            tmp_path / str(limit),
            encode=encode,
            model="scripted",
            about={},
            ks=(2,),
            seed=3,
        )
        assert found.value == pytest.approx(drawn.tasks["a"].pass_at[2].value)


def test_curves_have_a_line_for_each_benchmark_and_all(tmp_path: Path) -> None:
    results = evaluated(tmp_path, ScriptedEngine(script))
    curve = curve_over_k(results.answers, [1, 2, 4], seed=0)
    assert list(curve.lines) == ["a", "b", "all problems"]
    pooled = [curve.lines["a"][2].value * 6, curve.lines["b"][2].value * 4]
    assert curve.lines["all problems"][2].value == pytest.approx(sum(pooled) / 10)
    first = [path.read_bytes() for path in write_curves([curve], tmp_path)]
    assert [path.read_bytes() for path in write_curves([curve], tmp_path)] == first


def test_evaluations_of_several_models_make_one_table(tmp_path: Path) -> None:
    base = evaluated(tmp_path / "base", ScriptedEngine(script), sums("a", 6))
    better = evaluated(tmp_path / "better", ScriptedEngine(lambda prompt, _: prompt[2]), model="better")
    lines = paper_table([base.as_dict(), better.as_dict()]).split("\n")
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["model", "A", "B", "mean"]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]][2] == ""
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]][1].startswith("100.00 [")
    assert lines[3].rstrip("| ").split("|")[2].strip().endswith("(2)")
