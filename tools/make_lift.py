"""Make the model of recipes/compare-lift.yaml: a wrong attempt in its prompt helps it, as it does few small models.

    python -m tools.make_lift --out recipes/lift-model

Reflection can only pay where a model does better after seeing a past failure ("lift"). The bundled model does not: on
sums that it never solves in 16 tries, a plain answer and a reflection answer are right equally seldom. This one is the
bundled model after two more supervised lessons, in which plain working drops most carries while retries after a wrong
attempt drop hardly any, and every second example is a retry. It prints what came of it: `measure_lift`.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from r3.policy import ModelSettings
from r3.policy.model import Policy
from r3.tasks.arithmetic import problem_set
from tools.make_embedded import Recipe, is_right, reflection_prompt, sample, train
from tools.writer import Habits

TRIES = 16
DIFFICULTIES, LIMIT = (9, 10), 56


def lessons(drop_carry: float, retry_slips: float, steps: tuple[int, int]) -> tuple[Recipe, Recipe]:
    """Both lessons teach on the longest sums from the first step on, with every writer careless from the start."""
    habits = Habits(drop_carry=drop_carry)
    shared: dict[str, Any] = {
        "habits": habits, "retry_slips": retry_slips, "reflection_share": 0.5,
        "grown": 1e-9, "careful": -1.0, "careless": -0.5,
    }  # fmt: skip
    first = Recipe(seed=7, difficulties=(3, 7, 8, 9, 10), steps=steps[0], learning_rate=5e-4, warmup=0.1, **shared)
    second = Recipe(seed=8, difficulties=(3, 8, 9, 10), steps=steps[1], learning_rate=1e-3, **shared)
    return first, second


def measure_lift(policy: Policy, problems: int = 96) -> dict[str, float]:
    """How often an answer is right on sums never solved in 16 tries: 16 more plain ones, and 16 after a failure."""
    chosen = problem_set(1, problems, DIFFICULTIES, "heldout")
    model, tokenizer = policy.base, policy.tokenizer
    questions = [problem.question for problem in chosen]
    groups = sample(model, tokenizer, questions, 2 * TRIES, LIMIT)
    rights = [
        [is_right(problem, text, truncated=cut) for text, cut in group]
        for problem, group in zip(chosen, groups, strict=True)
    ]
    hard = [i for i, marks in enumerate(rights) if not any(marks[:TRIES])]
    rng = random.Random(0)
    shown = [rng.choice(groups[i][:TRIES])[0] for i in hard]
    prompts = [reflection_prompt(chosen[i].question, text) for i, text in zip(hard, shown, strict=True)]
    retries = sample(model, tokenizer, prompts, TRIES, LIMIT)
    retried = [is_right(chosen[i], t, truncated=cut) for i, row in zip(hard, retries, strict=True) for t, cut in row]
    plain = [ok for i in hard for ok in rights[i][TRIES:]]
    everything = [ok for marks in rights for ok in marks]
    return {
        "pass@1": sum(everything) / len(everything),
        "solve-none groups of 8": sum(not any(m[k : k + 8]) for m in rights for k in (0, 8, 16, 24))
        / (4 * len(rights)),
        "truncated": sum(cut for group in groups for _, cut in group) / len(everything),
        "never solved in 16 tries": len(hard) / len(chosen),
        "plain, on those": sum(plain) / max(1, len(plain)),
        "reflection, on those": sum(retried) / max(1, len(retried)),
    }


def main() -> None:
    """Teach, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lift"))
    parser.add_argument("--drop-carry", type=float, default=0.92)
    parser.add_argument("--retry-slips", type=float, default=0.03)
    parser.add_argument("--steps", type=int, nargs=2, default=(500, 600))
    parser.add_argument("--measure", type=Path, metavar="DIR", help="only measure the model in this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(ModelSettings(path=str(arguments.measure or "embedded"), device="cpu"))
    if arguments.measure is None:
        taught = lessons(arguments.drop_carry, arguments.retry_slips, tuple(arguments.steps))
        for lesson in taught:
            train(policy.base, policy.tokenizer, lesson)
        policy.base.save_pretrained(arguments.out)
        policy.tokenizer.save_pretrained(arguments.out)
        told = {"from": "embedded", "lessons": [asdict(lesson) for lesson in taught]}
        (arguments.out / "warm_start.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps({name: round(value, 4) for name, value in measure_lift(policy).items()}))


if __name__ == "__main__":
    main()
