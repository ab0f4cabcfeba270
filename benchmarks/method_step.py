"""How long Algorithm 1's inner part takes: `r3.step` on 128 groups of 16 samples, without the buffer's time.

Prediction, made before measuring: about 8 ms. A group costs some 20 µs of Python for rewards, advantages and weights,
and a solve-none group with truncated answers 150 µs more for partitioning 2,000 entropies per sample. Target: ≤ 20 ms.

    python benchmarks/method_step.py [--tokens 2000] [--out result.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from r3 import Group, MethodSettings, Query, Sample, step


def make_batch(groups: int, size: int, tokens: int) -> tuple[list[Group], dict[str, list[Sample]]]:
    """A hard batch: 60 % solve-none (a quarter of those answers truncated), 10 % solve-all, the rest mixed."""
    rng = np.random.default_rng(0)
    batch, history = [], {}
    for number in range(groups):
        query_id = f"q{number}"
        chance = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.3, 0.2)[number % 10]
        members = [_sample(rng, query_id, rng.random() < chance, tokens, version=300) for _ in range(size)]
        batch.append(Group(Query(query_id, "?"), tuple(members), np.arange(100, dtype=np.int32)))
        history[query_id] = [_sample(rng, query_id, bool(i % 2), tokens, version=i) for i in range(8)]
    return batch, history


def _sample(rng: np.random.Generator, query_id: str, right: bool, tokens: int, version: int) -> Sample:
    return Sample(
        query_id,
        rng.integers(0, 151_936, tokens, dtype=np.int32),
        -rng.random(tokens, dtype=np.float32),
        rng.random(tokens, dtype=np.float32),
        finish="length" if not right and rng.random() < 0.25 else "stop",
        outcome=right,
        reward=1.5 if right else 0.0,
        policy_version=version,
    )


def main() -> None:
    """Measure and print a Markdown row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batch, history = make_batch(options.groups, options.size, options.tokens)
    results = {}
    print(f"{options.groups} × {options.size} samples × {options.tokens} tokens, Python {platform.python_version()}")
    print("| method | median ms | max ms | samples to train on |\n|---|---|---|---|")
    for name in ("grpo", "dapo", "r3"):
        settings = MethodSettings(name=name)
        times = []
        for _ in range(options.repeat):
            started = time.perf_counter()
            result = step(batch, settings, history=history, policy_version=300)
            times.append(1000 * (time.perf_counter() - started))
        results[name] = {"median_ms": statistics.median(times), "max_ms": max(times), "trained": len(result.weighted)}
        print(f"| {name} | {statistics.median(times):.1f} | {max(times):.1f} | {len(result.weighted)} |")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
