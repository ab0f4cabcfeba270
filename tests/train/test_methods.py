"""Methods through the commands: what is named is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.cli import main
from r3.method.presets import METHODS
from r3.run import RunFiles
from tests.train.test_bad_input import refused
from tests.train.tiny import helped, overrides, read_metrics

OWN = ("run.dir", "run.seed", "train.epochs", "method=", "reward.")


def switched_on(method: dict[str, Any]) -> list[str]:
    return [name for name, part in method.items() if isinstance(part, dict) and part.get("enabled")]


def test_a_printed_config_and_a_runs_config_can_be_compared_and_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [text for text in overrides(tmp_path) if not text.startswith(OWN)]
    assert main(["train", "--print-config", *settings]) == 0
    mine = tmp_path / "my.yaml"
    mine.write_text(capsys.readouterr().out)
    out = tmp_path / "out"
    budget = ["--seeds", "1", "--tokens", "100", "--evaluations", "1", "--no-report"]
    assert main(["compare", str(mine), "--methods", "grpo,r3", *budget, "--out", str(out)]) == 0
    configs = {name: out / "cells" / name / "seed-0" / "config.yaml" for name in ("grpo", "r3")}
    methods = {name: yaml.safe_load(path.read_text())["method"] for name, path in configs.items()}
    assert {name: switched_on(method) for name, method in methods.items()} == {
        "grpo": [],
        "r3": ["replay", "reflection", "ranking"],
    }
    capsys.readouterr()
    for before, after, expected in (("r3", "grpo", []), ("grpo", "r3-no-replay", ["reflection", "ranking"])):
        assert main(["train", str(configs[before]), f"method={after}", "--print-config"]) == 0
        method = yaml.safe_load(capsys.readouterr().out)["method"]
        assert switched_on(method) == expected
        assert method["reflection"]["max_prompt_tokens"] == 200


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith("r3")])
def test_every_baseline_trains(tmp_path: Path, method: str) -> None:
    settings = overrides(tmp_path, method=method, reward__length_bonus="auto", train__steps=1)
    settings += ["method.resample.min_share=0"] if method == "polaris" else []  # one group of four has variance
    settings += helped(tmp_path) if method in ("luffy", "sage", "critique") else []
    assert main(["train", "--quiet", *settings, "train.updates_per_batch=2"]) == 0
    line = read_metrics(tmp_path / "run")[-1]
    assert line["groups/teaching"] > 0
    assert line["update/grad_norm"] > 0
    parts = [row["reward_parts"] for row in RunFiles(tmp_path / "run").rollouts.read(1)]
    assert all(part["length"] == 0 for part in parts)
    assert any("overlong" in part for part in parts) is (method == "dapo")


def test_remedies_can_be_compared(tmp_path: Path) -> None:
    settings = [text for text in overrides(tmp_path) if not text.startswith(OWN)]
    out, budget = tmp_path / "out", ["--seeds", "1", "--tokens", "100", "--evaluations", "1", "--no-report"]
    assert main(["compare", *settings, "--methods", "rl-zvp,exgrpo", *budget, "--out", str(out)]) == 0
    for name in ("rl-zvp", "exgrpo"):
        assert RunFiles(out / "cells" / name / "seed-0").read_info()


def test_dapo_punishes_what_is_cut_and_draws_again_by_outcomes(tmp_path: Path) -> None:
    more = {"rollout__max_tokens": 10, "run__rollouts_groups": 100, "reward__length_bonus": "auto"}
    settings = overrides(tmp_path, method="dapo", train__steps=2, **more)
    assert main(["train", "--quiet", *settings]) == 0
    rows = list(RunFiles(tmp_path / "run").rollouts.read(1))
    cut = [row for row in rows if row["finish"] == "length"]
    assert cut
    assert all(row["reward"] == pytest.approx(-0.5) and not row["outcome"] for row in cut)
    # Up to 8 tokens cost nothing, 9 half of the punishment, 10 all of it.
    assert {round(row["reward"], 2) for row in rows} <= {1.0, 0.75, 0.5, 0.0, -0.25, -0.5}
    lines = read_metrics(tmp_path / "run")[1:]
    assert any(line["groups"] > 4 for line in lines)  # four queries a step, and others for those without variance


def test_the_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all("needs" in line and preset.source in line for line, preset in zip(lines, METHODS.values(), strict=True))
    assert main(["methods", "dr_grpo"]) == 0
    shown = capsys.readouterr().out
    assert "method.advantage.scale=none" in shown
    assert "method.objective.normalise=constant" in shown
    assert "there are grpo, dapo" in refused(capsys, "methods", "ppo")
