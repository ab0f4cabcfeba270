"""`r3 compare --claim`: made-up curves with a known truth give the verdict they deserve, through the real report.

Covers r3.compare.tables, r3.compare.report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3.cli import main
from r3.compare.records import write_record
from r3.compare.report import write_report
from tests.compare.test_targets import BUDGET, STEPS, record
from tests.train.tiny import overrides

SLOPES = {"grpo": 0.1, "r3": 0.3, "twin": 0.1}


def comparison(out: Path, *, seeds: int = 3, looked_at: tuple[int, ...] = ()) -> Path:
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
        comparison(tmp_path / "out"),
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
    out = comparison(tmp_path / "out")
    assert judged(out) == {}
    assert "R³ reaches" not in (out / "report.md").read_text()  # this project's own are on its own pages


def test_where_there_is_no_evidence_nothing_is_supported(tmp_path: Path) -> None:
    assert judged(comparison(tmp_path / "one", seeds=1), "r3 > grpo") == {"r3 > grpo": "no interval: run more seeds"}
    seen = comparison(tmp_path / "seen", looked_at=(0, 1, 2))
    assert judged(seen, "r3 > grpo") == {"r3 > grpo": "no fresh seeds: no evidence"}


def test_a_claim_said_after_the_results_is_told(tmp_path: Path) -> None:
    out = comparison(tmp_path / "out")
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
    out = comparison(tmp_path / "out")
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
