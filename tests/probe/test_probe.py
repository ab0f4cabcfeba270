"""`r3 probe` as a person meets it: against engines whose rates are known exactly, and against a real model.

Covers r3.probe.draw, r3.probe.findings, r3.probe.advice, r3.commands.probe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.cli import main
from r3.config import validate
from r3.probe.findings import SERR
from tests.probe.scripted import RatedEngine, question
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
        settings = [*overrides(tmp_path), "task.heldout=0", "task.verifier=tests.probe.scripted.judge", *more]
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
    judged = ["task.heldout=0", "task.verifier=tests.probe.scripted.judge", "method=grpo"]
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
