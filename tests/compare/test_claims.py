"""The claims: each is called shown, half shown or not shown as made-up curves with a known truth deserve.

And which seeds a comparison has, and which of them were looked at before.

Covers r3.compare.analysis, r3.compare.report, r3.compare.tables.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.commands.compare import add_arguments
from r3.compare.analysis import Comparison
from r3.compare.plan import save_plan, undeclared
from r3.compare.records import BINS, SERIES, TOTALS, Record, write_record
from r3.compare.report import write_report
from r3.compare.tables import tables_of, targets_of
from tests.compare.test_command import plan
from tests.train.tiny import overrides

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


# `r3 compare --claim`: made-up curves with a known truth give the verdict they deserve, through the real report.


SLOPES = {"grpo": 0.1, "r3": 0.3, "twin": 0.1}


def finished_comparison(out: Path, *, seeds: int = 3, looked_at: tuple[int, ...] = ()) -> Path:
    """A finished comparison of three methods: r3 rises three times as fast as grpo, twin just as fast."""
    common = {
        "model": {"path": "tiny"},
        "task": {"name": "arithmetic", "difficulty": [3], "size": 8},
        "train": {"queries_per_step": 4, "learning_rate": 1e-4},
        "rollout": {"group_size": 4, "max_tokens": 12},
    }
    plan: dict[str, Any] = {"tokens": BUDGET, "evaluations": STEPS, "seeds": list(range(seeds)), "baseline": "grpo"}
    plan |= {"variants": {name: {} for name in SLOPES}, "common": common, "recipe": None, "looked_at": list(looked_at)}
    (out / "raw").mkdir(parents=True)
    (out / "raw" / "plan.json").write_text(json.dumps(plan))
    for name, slope in SLOPES.items():
        for seed in range(seeds):
            noise = (0.004 if name == "twin" else 0.0) * (-1) ** seed
            write_record(record(name, seed, slope + noise, 0.5), out)
    return out


def judged(out: Path, *claims: str) -> dict[str, str]:
    named = [argument for claim in claims for argument in ("--claim", claim)]
    assert main(["compare", "--report-only", str(out), *named]) == 0
    report = (out / "report.md").read_text()
    rows = {row["claim"]: row["verdict"] for row in json.loads((out / "summary.json").read_text())["claims"]}
    assert ("What was claimed" in report) == bool(rows)
    for claim, verdict in rows.items():
        (line,) = [line for line in report.splitlines() if line.startswith(f"| {claim} |")]
        assert f"| {verdict} |" in line
        assert claim.replace(">", "&gt;").replace("<", "&lt;") in (out / "report.html").read_text()
    return rows


def test_the_interval_decides(tmp_path: Path) -> None:
    assert judged(
        finished_comparison(tmp_path / "out"),
        "r3 > grpo",
        "grpo  >  r3",
        "r3 < grpo",
        "twin > grpo",
        "r3 > grpo in pass@4",
        "r3 < grpo in tokens",
        "r3 < 0.5 grpo in tokens",
        "r3 < 0.1 grpo in tokens",
        "r3 > grpo in tokens",
    ) == {
        "r3 > grpo": "supported",
        "grpo > r3": "contradicted",
        "r3 < grpo": "contradicted",
        "twin > grpo": "open",
        "r3 > grpo in pass@4": "supported",
        "r3 < grpo in tokens": "supported",
        "r3 < 0.5 grpo in tokens": "supported",  # a third, but for where the curves start
        "r3 < 0.1 grpo in tokens": "contradicted",
        "r3 > grpo in tokens": "contradicted",
    }


def test_without_claims_the_report_has_none(tmp_path: Path) -> None:
    out = finished_comparison(tmp_path / "out")
    assert judged(out) == {}
    assert "R³ reaches" not in (out / "report.md").read_text()  # this project's own are on its own pages


def test_where_there_is_no_evidence_nothing_is_supported(tmp_path: Path) -> None:
    assert judged(finished_comparison(tmp_path / "one", seeds=1), "r3 > grpo") == {
        "r3 > grpo": "no interval: run more seeds"
    }
    seen = finished_comparison(tmp_path / "seen", looked_at=(0, 1, 2))
    assert judged(seen, "r3 > grpo") == {"r3 > grpo": "no fresh seeds: no evidence"}


def test_a_claim_said_after_the_results_is_told(tmp_path: Path) -> None:
    out = finished_comparison(tmp_path / "out")
    plan = json.loads((out / "raw" / "plan.json").read_text())
    plan["claims"] = [{"claim": "r3 > grpo", "before": True}]
    (out / "raw" / "plan.json").write_text(json.dumps(plan))
    assert judged(out, "r3 > grpo", "twin > grpo").keys() == {"r3 > grpo", "twin > grpo"}
    report = (out / "report.md").read_text()
    assert "| supported | before the runs |" in report
    assert "| open | after results were there |" in report
    write_report(out)  # they stay
    assert (out / "report.md").read_text() == report


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ("r3 is better", "write 'r3 > grpo'"),
        ("r3 > dpo", "dpo is none of the variants: grpo, r3, twin"),
        ("r3 > r3", "compares r3 with itself"),
        ("r3 > grpo in f1", "no metric 'f1'; there are pass@1, pass@4, tokens"),
        ("r3 > 2 grpo", "a factor is for tokens"),
    ],
)
def test_what_is_no_claim_is_refused(claim: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = finished_comparison(tmp_path / "out")
    before = (out / "raw" / "plan.json").read_bytes()
    assert main(["compare", "--report-only", str(out), "--claim", claim]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert (out / "raw" / "plan.json").read_bytes() == before


def test_a_new_comparison_refuses_it_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        text for text in overrides(tmp_path) if not text.startswith(("run.dir", "run.seed", "train.epochs", "method="))
    ]
    budget = ["--tokens", "900", "--methods", "grpo,r3", "--out", str(tmp_path / "out")]
    assert main(["compare", *settings, *budget, "--claim", "r3 > dapo"]) == 2
    assert "dapo is none of the variants: grpo, r3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Which seeds a comparison has, and which of them were looked at.


@pytest.mark.parametrize(("text", "seeds"), [("1", [0]), ("3", [0, 1, 2]), ("4-6", [4, 5, 6]), ("7-7", [7])])
def test_seeds_are_a_number_of_them_or_a_range(text: str, seeds: list[int]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert list(parser.parse_args(["--seeds", text]).seeds) == seeds


def test_a_plan_knows_which_seeds_were_looked_at(tmp_path: Path) -> None:
    assert undeclared(plan(seeds=range(4)), tmp_path / "new") == []
    raw = tmp_path / "tried" / "raw"
    save_plan(plan(looked_at=range(2)), raw.parent)
    (raw / "grpo-seed3.json").touch()
    (raw / "grpo-seed4.json").touch()
    (note,) = undeclared(plan(seeds=range(6)), tmp_path / "new")  # beside it, with the same task
    assert "tried has results for seeds 3 to 4 of this task already" in note
    assert undeclared(plan(seeds=range(6), looked_at=range(5)), tmp_path / "new") == []
    assert undeclared(plan(seeds=range(3)), tmp_path / "new") == []
    assert undeclared(plan(seeds=range(6), overrides=["task.size=32"]), tmp_path / "new") == []
    assert save_plan(plan(looked_at=[3, 4]), raw.parent)["looked_at"] == [0, 1, 3, 4]


@pytest.mark.parametrize("text", ["0", "-1", "5-4", "4-", "a-b", "x"])
def test_seeds_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as refusal:
        parser.parse_args([f"--seeds={text}"])
    assert refusal.value.code == 2
    assert "--seeds" in capsys.readouterr().err.splitlines()[-1]
