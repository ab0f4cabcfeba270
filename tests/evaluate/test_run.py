"""An evaluation through any engine: every answer judged, kept, resumable at any answer, summed up in the same way.

pass@k and majority against exhaustive enumeration; intervals against simulated benchmarks whose truth is known.

Covers r3.evaluate.passk, r3.evaluate.curves, r3.evaluate.responses, r3.evaluate.results, r3.judging.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from r3.errors import RunError, TaskError
from r3.evaluate.curves import curve_over_k, curve_over_limits, write_curves
from r3.evaluate.passk import estimate, majority, pass_at_k, wilson
from r3.evaluate.responses import Judged, ResponseLog, SavedResponses, read_judged, write_parquet
from r3.evaluate.results import Results, hard_subset, paper_table
from r3.evaluate.run import Benchmark, evaluate_model
from r3.samples import Query
from r3.verify.judge import PlainJudge, Verdict
from tests.scripted import SAMPLING, TOKENIZER, ScriptedEngine, encode, sums


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


# The log of responses survives being cut anywhere, and foreign responses find their problems.


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


# pass@k, majority and their intervals.

outcomes = st.lists(st.booleans(), min_size=1, max_size=9)


@given(outcomes, st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    subsets = list(itertools.combinations(answers, k))
    share = Fraction(sum(map(any, subsets)), len(subsets))
    assert pass_at_k(len(answers), sum(answers), k) == float(share)


@given(st.integers(1, 1024), st.data())
def test_large_counts_lose_no_precision(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    miss = Fraction(1)
    for drawn in range(k):  # one draw after the other: the chance that it is wrong, given that all before were
        miss *= Fraction(max(0, n - right - drawn), n - drawn)
    assert pass_at_k(n, right, k) == pytest.approx(float(1 - miss), rel=1e-15, abs=0)


def test_pass_at_1_is_the_mean() -> None:
    assert [pass_at_k(16, right, 1) for right in (0, 1, 8, 16)] == [0, 1 / 16, 0.5, 1]


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be|needs at least"):
        pass_at_k(n, right, k)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6))
def test_majority_is_the_mean_over_all_orders_of_the_first_commonest_answer(answers: list[str | None]) -> None:
    def first_commonest(order: tuple[str | None, ...]) -> str | None:
        given = [answer for answer in order if answer is not None]
        return Counter(given).most_common(1)[0][0] if given else None  # ties go to the one met first

    orders = list(itertools.permutations(answers))
    expected = sum(first_commonest(order) == "a" for order in orders) / len(orders)
    assert majority([(answer, answer == "a") for answer in answers]) == pytest.approx(expected)


def simulated(rng: np.random.Generator, problems: int, samples: int, a: float, b: float) -> list[float]:
    """pass@1 of each problem of a benchmark whose difficulties are Beta(a, b): the truth is a / (a + b)."""
    return list(rng.binomial(samples, rng.beta(a, b, problems)) / samples)


def coverage(problems: int, a: float, b: float, *, trials: int) -> float:
    """How often the 95 % interval of a simulated benchmark holds the truth."""
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(trials):
        found = estimate(simulated(rng, problems, 16, a, b), seed=trial, resamples=800)
        covered += found.low <= a / (a + b) <= found.high
    return covered / trials


@pytest.mark.parametrize(("problems", "a", "b"), [(30, 0.3, 0.7), (40, 2, 2), (200, 0.3, 0.7)])
def test_intervals_cover_at_the_stated_rate(problems: int, a: float, b: float) -> None:
    trials, level = 800, 0.95
    assert abs(coverage(problems, a, b, trials=trials) - level) < 3 * math.sqrt(level * (1 - level) / trials)


def test_few_and_mostly_unsolved_problems_cost_at_most_a_point_of_coverage() -> None:
    """The skew of thirty such problems is more than the correction takes back: 94.2 ± 0.3 % in 5,500 trials."""
    trials, level = 800, 0.94
    assert coverage(30, 0.3, 3, trials=trials) > level - 3 * math.sqrt(level * (1 - level) / trials)


def test_the_interval_of_the_mean_over_benchmarks_covers_too() -> None:
    rng, trials, level = np.random.default_rng(11), 600, 0.9
    truth = (0.3 + 0.5 + 0.75) / 3
    covered = 0
    for trial in range(trials):
        marks = [simulated(rng, size, 4, *shape) for size, shape in ((30, (0.3, 0.7)), (40, (1, 1)), (120, (1.5, 0.5)))]
        found = estimate(*marks, seed=trial, level=level, resamples=600)
        covered += found.low <= truth <= found.high
    assert abs(covered / trials - level) < 3 * math.sqrt(level * (1 - level) / trials)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12), st.integers(0, 3))
def test_intervals_hold_the_value_and_stay_within_the_scores(scores: list[float], seed: int) -> None:
    found = estimate(scores, seed=seed, resamples=200)
    assert 0 <= found.low <= found.high <= 1
    assert found.value == pytest.approx(sum(scores) / len(scores))
    assert found == estimate(scores, seed=seed, resamples=200)


def test_equal_scores_do_not_mean_certainty() -> None:
    none = estimate([0.0] * 30, seed=0)
    assert (none.value, none.low, none.high) == (0, *wilson(0, 30))
    assert none.high > 0.1


def test_a_benchmark_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="without problems"):
        estimate([0.5], [], seed=0)
