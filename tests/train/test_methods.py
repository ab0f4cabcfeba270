"""Methods through the commands: what is named is what runs; help and self-distillation in whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from r3.buffer import SampleBuffer
from r3.cli import main
from r3.config import TrainSettings
from r3.method.presets import METHODS
from r3.method.settings import ObjectiveSettings
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory
from r3.policy.update import Updater
from r3.run import RunFiles
from tests.policy.test_update import policy_of
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


# Demonstrations, hints and critiques in whole runs: on the embedded sums, resumed, compared, refused.


HELPED = ("luffy", "sage", "critique")
SUMS = (
    *("train", "--quiet", "task.difficulty=[6]", "task.size=8", "task.heldout=4", "rollout.group_size=4"),
    *("train.steps=2", "train.queries_per_step=4", "run.threads=1", "run.tensorboard=false"),
)


def total(lines: list[dict[str, Any]], key: str) -> float:
    return sum(line.get(key, 0) for line in lines[1:])


@pytest.mark.parametrize("method", HELPED)
def test_the_embedded_sums_bring_their_own_help(tmp_path: Path, method: str) -> None:
    assert main([*SUMS, f"method={method}", f"run.dir={tmp_path / 'run'}"]) == 0
    lines = read_metrics(tmp_path / "run")
    rows = [row for step in (1, 2) for row in RunFiles(tmp_path / "run").rollouts.read(step)]
    with SampleBuffer.open_reader(tmp_path / "run" / "buffer.sqlite") as buffer:
        queries = {row["query"] for row in rows}
        kinds = {s.context.kind for samples in buffer.history(queries).values() for s in samples}
    if method == "luffy":
        assert total(lines, "demonstration/joined") == total(lines, "groups") == 8
        assert total(lines, "demonstration/wrong") == 0
        assert all(line["update/tokens/demonstration"] > 0 for line in lines[1:])
        shown = [row for row in rows if row["origin"] == "demonstration"]
        assert shown
        for row in shown:  # 1+2+3= is worked out as 1+2=3+3=6#6
            assert row["response"].startswith(row["query"].split("+")[0] + "+")
            assert row["response"].split("#")[0].endswith(f"={sum(map(int, row['query'].rstrip('=').split('+')))}")
            assert row["advantage"] >= 0
        assert kinds == {"plain"}
    elif method == "sage":
        assert 0 < total(lines, "hint/solved") <= total(lines, "hint/queries") <= total(lines, "groups/solve_none")
        assert kinds == {"plain", "hint"}
    else:
        assert total(lines, "groups/critique") == 4 * total(lines, "groups/solve_none") > 0
        assert total(lines, "critique/joined") <= total(lines, "critique/right")
        assert kinds == {"plain", "critique"}
    assert total(lines, "groups/teaching") > 0


@pytest.mark.parametrize("method", HELPED)
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, method: str) -> None:
    """Its last checkpoint is lost, so that a step is taken again: the same metrics, rollouts and buffer."""
    more = [*helped(tmp_path), "rollout.max_tokens=12"]
    settings = [*overrides(tmp_path, method=method, reward__length_bonus="auto", train__epochs=2), *more]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", "--quiet", *settings, "train.steps=5", f"run.dir={whole}"]) == 0
    assert main(["train", "--quiet", *settings, "train.steps=3", f"run.dir={cut}"]) == 0
    assert RunFiles(cut).checkpoints.steps() == [2, 3]
    shutil.rmtree(cut / "checkpoints" / "step-000003")
    assert main(["train", "--quiet", "--resume", str(cut), "train.steps=5"]) == 0
    # What is evaluated at the end of the shorter run is not in the longer one's third line.
    lines = [[{k: v for k, v in line.items() if not k.startswith("heldout/")} for line in read_metrics(run)]
             for run in (whole, cut)]  # fmt: skip
    assert json.dumps(lines[0], sort_keys=True) == json.dumps(lines[1], sort_keys=True)
    for step in range(1, 6):
        rows = [list(RunFiles(run).rollouts.read(step)) for run in (whole, cut)]
        assert json.dumps(rows[0]) == json.dumps(rows[1])
    keys = {"luffy": "demonstration/joined", "sage": "groups/hint", "critique": "groups/critique"}
    assert total(lines[0], keys[method]) > 0


def test_the_judge_decides_on_demonstrations_unless_they_are_trusted(tmp_path: Path) -> None:
    settings = [*overrides(tmp_path, method="luffy", reward__length_bonus="auto", train__steps=3), *helped(tmp_path)]
    counts = {}
    for trusted in ("false", "true"):
        run = tmp_path / trusted
        assert main(["train", "--quiet", *settings, f"run.dir={run}", f"method.demonstration.trusted={trusted}"]) == 0
        lines = read_metrics(run)
        counts[trusted] = (total(lines, "demonstration/joined"), total(lines, "demonstration/wrong"))
    joined, wrong = counts["false"]
    assert joined > 0
    assert wrong > 0
    assert joined + wrong == 12  # three steps of four queries
    assert counts["true"] == (12, 0)


def test_a_column_of_critiques_is_shown(tmp_path: Path) -> None:
    settings = [*overrides(tmp_path, method="critique", reward__length_bonus="auto", train__steps=3), *helped(tmp_path)]
    settings += ["method.critique.feedback=column", "run.rollouts_groups=100"]
    assert main(["train", "--quiet", *settings]) == 0
    rows = [row for step in (1, 2, 3) for row in RunFiles(tmp_path / "run").rollouts.read(step)]
    asked = [row["prompt"] for row in rows if row["context"] == "critique"]
    assert asked
    assert all(" NOT " in prompt and prompt.partition(" FOR ")[2].startswith("No ") for prompt in asked)


def test_they_can_be_compared(tmp_path: Path) -> None:
    settings = [
        text
        for text in overrides(tmp_path)
        if not text.startswith(("run.dir", "run.seed", "train.epochs", "method=", "reward."))
    ]
    budget = ["--seeds", "1", "--tokens", "100", "--evaluations", "1", "--no-report", "--out", str(tmp_path / "out")]
    assert main(["compare", *settings, *helped(tmp_path), "--methods", ",".join(HELPED), *budget]) == 0
    for name in HELPED:
        assert RunFiles(tmp_path / "out" / "cells" / name / "seed-0").read_info()


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run")], ids=["train", "dry-run"])
@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("luffy", (), "method.demonstration=on needs demonstrations, and no training query of task 'file' has any: "
                      "name the column of a file with task.demonstration_column"),
        ("sage", (), "method.hint=on needs hints, and no training query of task 'file' has any"),
        ("critique", ("method.critique.feedback=column",), "task.feedback_column"),
        ("sage", ("method.hint.max_prompt_tokens=250",), "method.hint.max_prompt_tokens=250 and rollout.max_tokens=12"),
        ("critique", ("method.critique.max_prompt_tokens=250",), "method.critique.max_prompt_tokens=250"),
        ("luffy", ("method.demonstration.trusted=true", "task.rewards=[correct]"),
         "set method.demonstration.trusted=false"),
    ],
)  # fmt: skip
def test_missing_help_is_refused_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    method: str,
    more: tuple[str, ...],
    message: str,
) -> None:
    has = helped(tmp_path) if "max_prompt_tokens" in str(more) else []
    settings = [*overrides(tmp_path, method=method, reward__length_bonus="auto"), *has, *more]
    assert message in refused(capsys, *command, *settings)
    assert not (tmp_path / "run").exists()


def test_demonstrations_that_are_all_too_long_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*overrides(tmp_path, method="luffy", reward__length_bonus="auto"), *helped(tmp_path)]
    line = refused(capsys, "train", *settings, "method.demonstration.max_tokens=3")
    assert "is longer than 3 tokens; raise method.demonstration.max_tokens" in line
    line = refused(capsys, "train", *settings, "method.demonstration.max_tokens=255")
    assert "method.demonstration.max_tokens=255 behind a prompt of" in line


# Self-distillation in a run: the teacher's passes are counted, and it is the policy itself under another prompt.


def test_answers_are_taught_and_the_passes_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Trajectory] = []
    original = Updater.logprobs

    def spy(self: Updater, sequences: Sequence[Trajectory]) -> Any:
        asked.extend(sequences)
        return original(self, sequences)

    monkeypatch.setattr(Updater, "logprobs", spy)
    settings = overrides(tmp_path, method="sdpo", reward__length_bonus="auto", train__steps=4)
    assert main(["train", "--quiet", *settings, "method.distill.template='{question}|{attempt}|'"]) == 0
    lines = read_metrics(tmp_path / "run")[1:]
    taught = [sum(line[f"distill/{shown}"] for shown in ("success", "history", "feedback")) for line in lines]
    assert [line["forwards/extra"] for line in lines] == taught
    assert sum(taught) == len(asked) > 0
    assert sum(line["distill/history"] for line in lines) > 0
    assert lines[0]["distill/history"] == 0
    assert all(line["update/grad_norm"] > 0 for line, count in zip(lines, taught, strict=True) if count)


def test_the_teacher_is_the_policy_under_another_prompt(tmp_path: Path) -> None:
    """Against the model's own forward, one sequence at a time."""
    policy, rng = policy_of(tmp_path), np.random.default_rng(0)
    sequences = [Trajectory(rng.integers(3, 60, n).astype(np.int32), rng.integers(3, 60, m).astype(np.int32))
                 for n, m in [(5, 3), (2, 7), (9, 1)]]  # fmt: skip
    settings = TrainSettings()
    updater = Updater(policy, Optimiser(policy.model.parameters(), settings, 3), ObjectiveSettings(), settings, 0.7)
    for sequence, found in zip(sequences, updater.logprobs(sequences), strict=True):
        ids = torch.tensor([*sequence.prompt.tolist(), *sequence.response.tolist()])
        logs = (policy.base(input_ids=ids.unsqueeze(0)).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = logs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)[len(sequence.prompt) - 1 :]
        assert np.allclose(found, expected.detach().numpy(), atol=1e-5)


def test_a_teachers_prompt_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overrides(tmp_path, method="sdpo", reward__length_bonus="auto", method__distill__max_prompt_tokens=250)
    assert "method.distill.max_prompt_tokens=250 and rollout.max_tokens=" in refused(capsys, "train", *settings)
