"""`r3 probe` as a person meets it, and what it computes: engines with known rates, oracles that count, a real model.

Covers r3.commands.probe, r3.probe.advice, r3.probe.draw, r3.probe.findings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from r3.cli import main
from r3.config import validate
from r3.method.ranking import dominance_scores, late_pairs, ordered_pairs, structure
from r3.probe import findings
from r3.probe.advice import LEAST_LIFT
from r3.probe.findings import SERR
from tests.scripted import RatedEngine, question
from tests.train.tiny import overrides, run_r3, save_model

Probe = Callable[..., dict[str, Any]]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Runs `r3 probe` on questions that state their rates, and returns what it wrote as JSON."""

    def run(
        questions: Sequence[str], *more: str, engine: RatedEngine | None = None, tokens: int = 60_000
    ) -> dict[str, Any]:
        asked = engine or RatedEngine()
        monkeypatch.setattr("r3.train.build.make_engine", lambda config, policy: asked)
        rows = [{"id": f"q{i}", "problem": text, "answer": "y"} for i, text in enumerate(questions)]
        (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = tmp_path / "probe.json"
        settings = [*overrides(tmp_path), "task.heldout=0", "task.verifier=tests.scripted.judge", *more]
        assert main(["probe", *settings, "--tokens", str(tokens), "--json", str(file)]) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        assert asked.tokens == found["tokens"]["generated"] <= tokens == found["tokens"]["budget"]
        return found

    return run


def advice(found: dict[str, Any]) -> dict[str, str]:
    return {line["about"]: line["pays"] for line in found["advice"]}


def holds(interval: dict[str, float], truth: float) -> bool:
    return interval["low"] <= truth <= interval["high"]


def test_a_known_lift_is_measured_and_advised(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty queries that are never solved but after a shown failure, ten that are solved three times in four."""
    found = probe([*(question(i, 0.0, 0.3) for i in range(40)), *(question(i, 0.75, 0.75) for i in range(40, 50))])
    facts = found["findings"]
    assert facts["queries"] == 50
    assert facts["hard"] == 40
    assert facts["lift"]["queries"] == 40
    assert facts["lift"]["right"][0] == 0
    assert holds(facts["lift"]["reflection"], 0.3)
    assert holds(facts["pass_at"]["1"], 0.15)
    assert holds(facts["pass_at"]["4"], 0.2 * (1 - 0.25**4))
    assert holds(facts["solve"]["none"], 0.8 + 0.2 * 0.25**4)
    assert holds(facts["solve"]["all"], 0.2 * 0.75**4)
    assert sum(share["value"] for share in facts["solve"].values()) == pytest.approx(1)
    assert facts["lift"]["tokens_per_right"][0] is None
    assert facts["lift"]["tokens_per_right"][1] == pytest.approx(3 / 0.3, rel=0.2)  # 1 to 3 letters and the end
    assert advice(found)["reflection"] == "yes"
    assert found["settings"]["method"]["reflection"] == {
        "enabled": True,
        "budget": "shared",
        "at_once": True,
        "window": 8,
        "min_lift": 2.0,
    }
    printed = capsys.readouterr().out
    assert "never solved" in printed
    assert "budget: shared" in printed


def test_without_a_lift_reflection_is_off(probe: Probe) -> None:
    found = probe([question(i, 0.03, 0.03) for i in range(60)], tokens=120_000)
    lift = found["findings"]["lift"]
    assert holds(lift["ratio"], 1)
    assert holds(lift["plain"], 0.03)
    assert holds(lift["reflection"], 0.03)
    assert holds(found["findings"]["replay"]["success"], (1 - 0.97**4) * 0.97**4)
    assert advice(found)["replay"] == "yes"
    assert advice(found)["reflection"] == "no"
    assert found["settings"]["method"]["reflection"] == {"enabled": False}


def test_an_order_that_tells_who_finishes_right_is_found(probe: Probe) -> None:
    """Half of the cut answers finish right; in one engine SERR's order knows which, in the other it is noise."""
    questions = [question(i, 0.1, 0.1, cut=0.7) for i in range(40)]
    found = probe(questions, engine=RatedEngine(telling=True))
    auc = found["findings"]["ranking"]["auc"]
    assert auc[SERR]["low"] > 0.8
    assert auc["shortness"]["value"] == 0.5  # all were cut at one length
    assert holds(found["findings"]["truncated"], 0.7)
    assert holds(found["findings"]["at_twice"]["finish_right"], 0.5)
    assert found["findings"]["at_twice"]["accuracy"] == pytest.approx(0.3 * 0.1 + 0.35, abs=0.08)
    assert found["settings"]["method"]["ranking"] == {"enabled": True}
    assert found["settings"]["evaluate"] == {"max_tokens": 24}

    noise = probe(questions)
    auc = noise["findings"]["ranking"]["auc"]
    assert auc[SERR]["value"] == pytest.approx(0.5, abs=0.08)
    assert auc[SERR]["high"] - auc[SERR]["low"] < 0.4
    assert advice(noise)["ranking"] == "no"
    assert noise["settings"]["method"]["ranking"] == {"enabled": False}


def test_the_seed_decides_the_answers(probe: Probe) -> None:
    questions = [question(i, 0.2, 0.4, cut=0.2) for i in range(30)]
    runs = [probe(questions, f"run.seed={seed}", tokens=6_000) for seed in (1, 1, 2)]
    for found in runs:
        del found["machine"], found["seed"]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("tokens", [768, 1_000, 2_500])
def test_a_small_budget_is_kept(probe: Probe, tokens: int) -> None:
    """Also where every answer reaches the limit; the fixture compares what was generated with the budget."""
    found = probe([question(i, 0.0, 0.5, cut=1.0) for i in range(30)], tokens=tokens)
    assert found["findings"]["queries"] >= 4
    assert found["findings"]["truncated"]["value"] == 1


def test_what_cannot_be_drawn_is_said(probe: Probe, tmp_path: Path) -> None:
    save_model(tmp_path / "model", context=64)
    questions = [question(i, 0.5, 0.5, cut=0.5) for i in range(10)]
    found = probe(questions, "method.reflection=off")  # a prompt of some 36 letters, and 12 more: none for another 12 …
    assert found["findings"]["at_twice"]["carried_on"] > 0
    save_model(tmp_path / "model", context=56)
    found = probe(questions, "method.reflection=off")
    assert found["findings"]["at_twice"]["carried_on"] == 0
    assert found["findings"]["at_twice"]["no_room"] > 0
    assert advice(found)["ranking"] == advice(found)["twice the limit"] == "unknown"
    hard = probe([question(i, 0.0, 0.5) for i in range(10)], "method.reflection=off")  # no room to show an attempt
    assert hard["findings"]["lift"] is None
    assert hard["findings"]["refused"] == {"too_long": 10}
    assert advice(hard)["reflection"] == "unknown"
    easy = probe([question(i, 1.0, 1.0) for i in range(10)], "method.reflection=off")
    assert advice(easy)["reflection"] == "no"
    assert advice(easy)["data"] == "no"


def test_the_folder_holds_a_recipe_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("r3.train.build.make_engine", lambda config, policy: RatedEngine())
    rows = [{"id": str(i), "problem": question(i, 0.0, 0.4), "answer": "y"} for i in range(30)]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = ["task.heldout=0", "task.verifier=tests.scripted.judge", "method=grpo"]
    folder = tmp_path / "out"
    assert main(["probe", *overrides(tmp_path), *judged, "--tokens", "10000", "--out", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"probe.json", "report.txt", "recipe.yaml"}
    assert "Expected to pay" in (folder / "report.txt").read_text()
    config = validate(yaml.safe_load((folder / "recipe.yaml").read_text()))
    assert config.method.name == "grpo"
    assert config.method.replay.enabled
    assert config.method.reflection.budget == "shared"
    assert config.rollout.max_tokens == 12
    capsys.readouterr()
    assert main(["train", str(folder / "recipe.yaml"), "--print-config"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "767"], "--tokens 767: this recipe's groups of 4 answers of up to 12 tokens need at least"),
        (["--json", "{tmp}/none/probe.json"], "not a file in a folder that is there; make the folder first"),
        (["--out", "{tmp}"], "there is something already; name a new or an empty folder"),
        (["method.replay.many=3"], "method.replay.many: no such setting"),
        (["--out", "{tmp}/new", "rollout.max_tokens=300"], "the model's context is 256"),
    ],
)
def test_bad_input_is_refused_before_a_token_is_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    engine = RatedEngine()
    monkeypatch.setattr("r3.train.build.make_engine", lambda config, policy: engine)
    settings = overrides(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["probe", *settings, *(text.replace("{tmp}", str(tmp_path)) for text in arguments)]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1
    assert message in lines[0]
    assert engine.tokens == 0
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_real_model_through_the_real_command(tmp_path: Path) -> None:
    """The bundled model on a small budget, in a process of its own, twice."""
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        run_r3("probe", "--tokens", "6000", "--json", file, "task.heldout=0", "run.threads=1")
    a, b = (json.loads(file.read_text()) for file in files)
    assert a["tokens"]["generated"] <= 6000
    assert a["machine"].pop("tokens_per_second") > 0
    assert a["machine"].pop("peak_memory_gb") > 0
    assert {**a, "machine": None} == {**b, "machine": None}
    assert set(a["findings"]["reasons"]) <= {"match", "wrong", "no answer", "truncated"}


# What a probe computes from counts, against oracles that count one by one, and intervals against a known truth.


SIMULATIONS = 200


@pytest.mark.parametrize("group", [2, 3, 4])
def test_chances_of_a_group_are_averages_over_all_ways_to_deal_the_answers(group: int) -> None:
    for right in range(2 * group + 1):
        answers = [True] * right + [False] * (2 * group - right)
        deals = [set(first) for first in combinations(range(2 * group), group)]
        firsts = [[answers[i] for i in deal] for deal in deals]
        seconds = [[answers[i] for i in range(2 * group) if i not in deal] for deal in deals]
        none = sum(not any(first) for first in firsts) / len(deals)
        every = sum(all(first) for first in firsts) / len(deals)
        replay = sum(any(a) and not any(b) for a, b in zip(firsts, seconds, strict=True)) / len(deals)
        assert findings.none_right(right, group) == pytest.approx(none)
        assert findings.all_right(right, group) == pytest.approx(every)
        assert findings.to_replay(right, group) == pytest.approx(replay)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30))
def test_pairs_in_order_are_the_area_under_the_roc_curve(answers: list[tuple[int, bool]]) -> None:
    in_order, pairs = ordered_pairs([score for score, _ in answers], [right for _, right in answers])
    positives = sum(right for _, right in answers)
    negatives = len(answers) - positives
    assert pairs == positives * negatives
    if not pairs:
        assert in_order == 0
        return
    # The curve from threshold to threshold, its area by trapezoids.
    points = [(0.0, 0.0)]
    for threshold in sorted({score for score, _ in answers}, reverse=True):
        taken = [right for score, right in answers if score >= threshold]
        points.append(((len(taken) - sum(taken)) / negatives, sum(taken) / positives))
    area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points))
    assert in_order / pairs == pytest.approx(area)


def test_the_order_at_half_the_limit_sees_nothing_of_what_came_later() -> None:
    explores, drifts, short = [3.0, 0, 0, 0], [1.0, 1, 1, 1], [9.0, 9]
    for rest in ([0.0], [50.0] * 4):
        rows = [np.array(row) for row in (explores + rest, drifts + rest, short)]
        assert late_pairs(rows, [True, False, True], limit=8, peak_fraction=0.25) == (1.0, 1)
        assert late_pairs(rows, [False, True, True], limit=8, peak_fraction=0.25) == (0.0, 1)
    stopped_at_half = [np.array(explores), np.array(drifts)]
    assert late_pairs(stopped_at_half, [True, False], limit=8, peak_fraction=0.25) == (0.0, 0)


def simulated(rate: float, spread: float, rng: np.random.Generator, tried: list[int]) -> list[int]:
    """Right answers to queries whose difficulties differ."""
    return list(rng.binomial(tried, rng.beta(rate * spread, (1 - rate) * spread, len(tried))))


def coverage(intervals: list[findings.Estimate], truth: float) -> float:
    return sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals)


TRIED = [16] * 30 + [8] * 20


def test_intervals_hold_a_known_lift() -> None:
    rng = np.random.default_rng(0)
    pairs = [(simulated(0.3, 4, rng, TRIED), simulated(0.06, 4, rng, TRIED)) for _ in range(SIMULATIONS)]
    ratios = [findings.ratio(a, b, TRIED, seed=0) for a, b in pairs]
    assert coverage(ratios, 5.0) >= 0.9
    assert np.median([ratio.value for ratio in ratios]) == pytest.approx(5, rel=0.1)


def test_no_lift_is_seldom_taken_for_one() -> None:
    """Equal chances on either side, mostly near nothing: the rule of `advice` on both."""
    rng = np.random.default_rng(1)
    taken = 0
    for _ in range(SIMULATIONS):
        chances = rng.beta(0.04, 1.96, len(TRIED))
        first, second = (list(rng.binomial(TRIED, chances)) for _ in range(2))
        ratio = findings.ratio(first, second, TRIED, seed=0)
        taken += ratio.low > 1 and ratio.value >= LEAST_LIFT
    assert taken <= 0.03 * SIMULATIONS


def test_two_sides_that_were_never_right_say_nothing_of_their_ratio() -> None:
    never = [0] * 20
    ratio = findings.ratio(never, never, [16] * 20, seed=0)
    assert ratio.value == 1
    assert ratio.low < 0.05
    assert ratio.high > 20


@pytest.mark.parametrize(("queries", "truth"), [(60, 0.7), (25, 0.5), (60, 0.03)])
def test_shares_hold_the_truth(queries: int, truth: float) -> None:
    """Queries differ in their share and in how many answers they have."""
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(SIMULATIONS):
        wholes = rng.integers(1, 20, queries)
        chances = rng.beta(truth * 6, (1 - truth) * 6, queries)
        shares.append(findings.share(list(rng.binomial(wholes, chances)), list(wholes)))
    assert coverage([share for share in shares if share is not None], truth) >= 0.92


@pytest.mark.parametrize("answers", [4, 12])
def test_an_order_that_is_noise_is_seldom_taken_for_information(answers: int) -> None:
    """SERR's scores of random entropies, many of them tied, in thirty queries."""
    rng = np.random.default_rng(3)
    above = below = 0
    for _ in range(SIMULATIONS):
        pairs = []
        for _ in range(30):
            peaks, wholes = structure(list(rng.random((answers, 12))), peak_fraction=0.25)
            pairs.append(ordered_pairs(dominance_scores(peaks, wholes), rng.random(answers) < 0.3))
        area = findings.share([in_order for in_order, _ in pairs], [of for _, of in pairs])
        assert area is not None
        above, below = above + (area.low > 0.5), below + (area.high < 0.5)
    assert above <= 0.05 * SIMULATIONS
    assert below <= 0.05 * SIMULATIONS


def test_shares_admit_too_few_queries() -> None:
    assert findings.share([], []) is None
    assert findings.share([0, 0], [0, 0]) is None
    few = findings.share([3, 3], [3, 3])
    assert few is not None
    assert (few.value, few.low, few.high) == (1.0, 0.0, 1.0)
    uneven = findings.share([500, *[0] * 11], [900, *[1] * 11])  # one query has nearly all of the pairs
    assert uneven is not None
    assert (uneven.low, uneven.high) == (0.0, 1.0)
    many = findings.share([3] * 8, [3] * 8)
    assert many is not None
    assert many.low < 0.8
    assert many.high == 1.0
