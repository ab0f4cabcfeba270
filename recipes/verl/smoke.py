"""What smoke.sh's two runs came to, from verl's metrics: one line per step, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHOWN = {
    "critic/score/mean": "score",
    "r3_method/groups/solve_none": "solve none",
    "r3_method/groups/reflection": "reflecting",
    "r3_method/replay/samples": "replayed",
    "r3_method/ranking/samples": "ranked",
    "actor/grad_norm": "gradient",
    "training/rollout_probs_diff_mean": "rollout − trainer",
    "timing_s/step": "seconds",
}
FAR = 0.05
"""A mean difference of probabilities between the rollout's forward and the trainer's that rounding does not make."""


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {int(line["step"]): line["data"] for line in lines}


def problems(first: dict[int, dict[str, Any]], resumed: dict[int, dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    every = {**first, **resumed}
    found = []
    if sorted(first) != [1, 2, 3] or sorted(resumed) != [4]:
        found.append(f"steps {sorted(first)} and then {sorted(resumed)}, not 1 to 3 and then 4")
    found += [
        f"r3_method/{name} was 0 in every step"
        for name in ("replay/samples", "groups/reflection")
        if not any(step.get(f"r3_method/{name}", 0) > 0 for step in every.values())
    ]
    gaps = [step.get("training/rollout_probs_diff_mean", 0.0) for step in every.values()]
    if max(gaps, default=0.0) > FAR:
        found.append(
            f"rollout and trainer differ by {max(gaps):.3f} on average: the engine's weights are not the actor's"
        )
    return found


def main(folder: Path) -> int:
    first, resumed = read(folder / "first.jsonl"), read(folder / "resumed.jsonl")
    for number, step in sorted({**first, **resumed}.items()):
        print(f"step {number}  " + "  ".join(f"{name} {step[key]:.4g}" for key, name in SHOWN.items() if key in step))
    found = problems(first, resumed)
    print("; ".join(found) if found else "R³ in verl works here: steps, checkpoint and resume")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
