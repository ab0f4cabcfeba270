"""The claims: each is called shown, half shown or not shown as made-up curves with a known truth deserve.

Covers r3.compare.analysis, r3.compare.tables.
"""

from __future__ import annotations

from typing import Any

from r3.compare.analysis import Comparison
from r3.compare.records import BINS, SERIES, TOTALS, Record
from r3.compare.tables import tables_of, targets_of

BUDGET, STEPS = 10_000, 10


def record(variant: str, seed: int, slope: float, solve_none: float) -> Record:
    """pass@1 rises from 5 % by `slope` over the budget, a little more with each seed."""
    points = [
        {"tokens": at * BUDGET / STEPS, "step": at, "pass@1": 0.05 + (slope + 0.001 * seed) * at / STEPS}
        for at in range(STEPS + 1)
    ]
    evaluations = [{**point, "pass@4": 2 * point["pass@1"], "truncated": 0.0, "length": 10.0} for point in points]
    training = {key: [solve_none] * BINS for key in SERIES} | {"tokens": [float(i) for i in range(BINS)]}
    totals = dict.fromkeys((*TOTALS, "steps"), 1.0)
    return Record(variant, seed, "r3 train", 4, 32, evaluations, training, totals, {})


def comparison(
    slopes: dict[str, float], solve_none: dict[str, float], looked_at: dict[int, dict[str, float]] | None = None
) -> Comparison:
    """`looked_at`: seeds that settings were chosen on, with slopes of their own."""
    plan: dict[str, Any] = {"tokens": BUDGET, "evaluations": STEPS, "seeds": [0, 1, 2], "baseline": "grpo"}
    plan["variants"] = {name: {} for name in slopes}
    records = [
        record(name, seed, slope, solve_none.get(name, 0.5)) for name, slope in slopes.items() for seed in range(3)
    ]
    plan["looked_at"] = list(looked_at or ())
    plan["seeds"] = sorted({0, 1, 2, *plan["looked_at"]})
    records = [one for one in records if one.seed not in plan["looked_at"]]
    for seed, tuned in (looked_at or {}).items():
        records += [record(name, seed, slope, 0.5) for name, slope in tuned.items()]
    return Comparison(plan, records)


def verdicts(c: Comparison) -> dict[str, str]:
    table = targets_of(c)
    assert table is not None
    return {row[0].split(" ")[0] + " " + row[0].split(" ")[2]: row[2] for row in table.rows}


def test_what_is_true_is_shown_and_what_is_not_is_not() -> None:
    slopes = {"grpo": 0.1, "dapo": 0.1, "r3": 0.3, "r3-no-replay": 0.1, "r3-no-reflection": 0.3, "r3-no-ranking": 0.35}
    found = verdicts(comparison(slopes, {"grpo": 0.6, "r3": 0.2}))
    assert found == {
        "R³ grpo's": "shown",
        "R³ dapo's": "shown",
        "solve-none at": "number only",
        "held-out not": "shown",
        "r3-no-replay final": "shown",
        "r3-no-reflection final": "not shown",
        "r3-no-ranking final": "not shown",
    }


def test_a_method_no_better_than_the_baseline_shows_nothing() -> None:
    found = verdicts(comparison({"grpo": 0.1, "r3": 0.1}, {"grpo": 0.4, "r3": 0.4}))
    assert found["R³ grpo's"] == "not shown"
    assert found["solve-none at"] == "not shown"


def test_a_level_that_is_asked_for_has_its_tokens() -> None:
    c = comparison({"grpo": 0.1, "r3": 0.3}, {})
    c.level = 0.1
    table = next(table for table in tables_of(c) if table.title.startswith("Tokens"))
    assert table.header[-1] == "tokens to 10.0%"
    slow, fast = (int(row[-1].replace(",", "")) for row in table.rows)
    assert abs(slow - 0.05 / 0.101 * BUDGET) < 5  # the mean slope over the three seeds is 0.001 more
    assert abs(fast - 0.05 / 0.301 * BUDGET) < 5
    assert [row[-1] for row in tables_of(comparison({"grpo": 0.1}, {}))[1].rows] == ["–"]


def test_without_r3_there_is_nothing_to_claim() -> None:
    assert targets_of(comparison({"grpo": 0.1, "dapo": 0.2}, {})) is None


def test_claims_are_made_from_seeds_that_no_setting_was_chosen_on() -> None:
    alike, tuned = {"grpo": 0.1, "r3": 0.1}, {3: {"grpo": 0.1, "r3": 0.9}, 4: {"grpo": 0.1, "r3": 0.9}}
    honest = comparison(alike, {}, tuned)
    assert verdicts(honest)["R³ grpo's"] == "not shown"
    assert verdicts(comparison({"grpo": 0.1, "r3": 0.9}, {}))["R³ grpo's"] == "shown"
    *told, apart = tables_of(honest)
    without = tables_of(comparison(alike, {}))
    assert [table.rows for table in told] == [table.rows for table in without]  # as if the others had not been run
    assert apart.title == "Looked at: seeds 3 to 4, which settings were chosen on"
    assert [row[:2] for row in apart.rows] == [["grpo", "2"], ["r3", "2"]]
    assert apart.rows[1][3].startswith("95.")  # its final value


def test_with_no_fresh_seed_nothing_is_claimed() -> None:
    tuned = {seed: {"grpo": 0.1, "r3": 0.9} for seed in range(3)}
    c = comparison({"grpo": 0.1, "r3": 0.1}, {}, tuned)
    assert targets_of(c) is None
    titles = [table.title for table in tables_of(c)]
    assert titles[0].startswith("Looked at: seeds 0 to 2")
    assert not any("Paired tests" in title or "Tokens to reach" in title for title in titles)


def test_dapo_with_truncated_answers_masked_is_never_just_dapo() -> None:
    c = comparison({"grpo": 0.1, "dapo": 0.1, "r3": 0.3}, {})
    c.plan["variants"]["dapo"] = {"method": {"mask_truncated": True}}
    said = " ".join(" ".join([table.title, *table.header, *(row[0] for row in table.rows)]) for table in tables_of(c))
    claims = targets_of(c)
    assert claims is not None
    said += " ".join(row[0] for row in claims.rows)
    assert [row[2] for row in claims.rows[:2]] == ["shown", "shown (not of DAPO as published)"]
    assert said.count("dapo") == said.count("dapo (truncated masked)") > 5
