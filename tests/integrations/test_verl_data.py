"""`r3 data verl`, `recipes/verl/run.sh` and smoke.py: what they write, start and make of metrics.

Covers r3.commands.data, r3.integrations.verl.data.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, run_r3


def export(folder: Path, ids: list[str], *more: str, check: bool = True) -> tuple[int, str]:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'r3-rl[parquet]'")
    rows = [{"id": name, "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i, name in enumerate(ids)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(f"task: {{name: file, heldout: 1, path: {folder / 'sums.jsonl'}}}\n")
    done = run_r3("data", "verl", folder / "recipe.yaml", *more, "--to", folder / "out", check=check)
    return done.returncode, done.stdout + done.stderr


def test_rows_as_verl_wants_them(tmp_path: Path) -> None:
    _, said = export(tmp_path, ["a", "b", "c"], "task.instruction=Think.")
    from pyarrow import parquet

    assert "train.parquet: 2 queries" in said
    assert "note" not in said
    train = parquet.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert train[1] == {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "What is 1+1?\n\nThink."}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": "b", "split": "train"},
    }
    heldout = parquet.read_table(tmp_path / "out/heldout.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in heldout] == ["c"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["heldout.parquet", "train.parquet"]


def test_ids_must_be_unique(tmp_path: Path) -> None:
    code, said = export(tmp_path, ["a", "a", "c"], check=False)
    assert code != 0
    assert "'a'" in said


def test_it_says_when_verl_needs_another_judge(tmp_path: Path) -> None:
    _, said = export(tmp_path, ["a", "b"], "task.verifier=tests.train.tiny.judge")
    assert "this task's verifier is tests.train.tiny.judge" in said
    assert "reward.custom_reward_function.path" in said


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """run.sh with a `python` that says what it was asked to run; it fails where a line of it is in FAIL."""
    stub = folder / "python"
    stub.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *"${FAIL:-nothing at all}"*) exit 1;; esac\n')
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = [str(ROOT / "recipes/verl/run.sh"), *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


def test_run_script_checks_the_plugin_and_starts_verl_with_whole_paths(tmp_path: Path) -> None:
    done = start(tmp_path, "deepscaler-7b", "+r3_method.replay.k=4", NNODES="8", R3_VERL_DATA="in")
    assert done.returncode == 0, done.stderr
    check, run = done.stdout.splitlines()
    assert check.endswith("-m r3.integrations.verl")
    expected = [
        f"-m verl.trainer.main_ppo --config-path {ROOT / 'recipes/verl'} --config-name deepscaler-7b",
        f"data.train_files={tmp_path / 'in/train.parquet'} data.val_files={tmp_path / 'in/heldout.parquet'}",
        f"trainer.default_local_dir={tmp_path / 'checkpoints/deepscaler-7b'}",
        "trainer.nnodes=8 trainer.n_gpus_per_node=8 +r3_method.replay.k=4",
    ]
    assert run == " ".join(expected)


def test_run_script_starts_verls_v0_trainer(tmp_path: Path) -> None:
    done = start(tmp_path, "deepscaler-7b", R3_VERL_TRAINER="v0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("-m r3.integrations.verl.v0 --config-path")
    done = start(tmp_path, "deepscaler-7b", R3_VERL_TRAINER="v2")
    assert done.returncode == 2
    assert "R3_VERL_TRAINER=v2: there are v1 and v0" in done.stderr


def test_run_script_stops_where_verl_would_go_on_without_the_plugin(tmp_path: Path) -> None:
    done = start(tmp_path, "deepscaler-7b", FAIL="r3.integrations.verl")
    assert (done.returncode, "main_ppo" in done.stdout) == (1, False)
    done = start(tmp_path, "deepscaler-70b")
    assert done.returncode == 2
    assert "no such recipe; there are deepscaler-1.5b, deepscaler-7b and gsm8k-smollm2" in done.stderr


# What recipes/verl/smoke.py makes of verl's metrics. The runs themselves need a GPU.


SCRIPT = Path(__file__).parents[2] / "recipes" / "verl" / "smoke.py"


def step(**changed: float) -> dict[str, Any]:
    return {
        "r3_method/replay/samples": changed.get("replayed", 3),
        "r3_method/groups/reflection": changed.get("reflecting", 5),
        "training/rollout_probs_diff_mean": changed.get("gap", 0.01),
    }


def smoke(folder: Path, first: dict[int, Any], resumed: dict[int, Any]) -> subprocess.CompletedProcess[str]:
    for name, steps in (("first", first), ("resumed", resumed)):
        lines = [json.dumps({"step": number, "data": data}) for number, data in steps.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)


def test_all_is_well(tmp_path: Path) -> None:
    done = smoke(tmp_path, {1: step(replayed=0, reflecting=0), 2: step(), 3: step()}, {4: step()})
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0].startswith("step 1  reflecting 0  replayed 0")
    assert done.stdout.splitlines()[-1] == "R³ in verl works here: steps, checkpoint and resume"


@pytest.mark.parametrize(
    ("first", "resumed", "said"),
    [
        ({1: step(), 2: step()}, {4: step()}, "steps [1, 2] and then [4], not 1 to 3 and then 4"),
        ({1: step(), 2: step(), 3: step()}, {1: step()}, "and then [1]"),
        ({i: step(replayed=0) for i in (1, 2, 3)}, {4: step(replayed=0)}, "replay/samples was 0 in every step"),
        ({1: step(), 2: step(gap=0.3), 3: step()}, {4: step()}, "differ by 0.300 on average"),
    ],
)
def test_what_is_not_is_said(tmp_path: Path, first: dict[int, Any], resumed: dict[int, Any], said: str) -> None:
    done = smoke(tmp_path, first, resumed)
    assert done.returncode == 1
    assert said in done.stdout
