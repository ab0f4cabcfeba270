"""What recipes/verl/smoke.py makes of verl's metrics. The runs themselves need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
