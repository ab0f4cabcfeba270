"""Tokens per second of the portable engine on the bundled model: 128 prompts × 8 samples, ragged answers.

Prediction, made before measuring: about 8,000 tokens/s on two threads at 256 rows; a decoding step of this model costs
some 25 ms at 256 rows, half of it attention over the cache.

    python benchmarks/rollout_cpu.py [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch

from r3.config import load_config
from r3.rollout import Request
from r3.train.build import build


def main() -> None:
    """Print a row for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.threads} threads\n")
    print("| rows | tokens | tokens/s, best of 3 |\n|---|---|---|")
    for rows in (64, 128, 256, 512):
        parts = build(load_config(None, [f"run.threads={options.threads}", f"rollout.max_rows={rows}"]))
        requests = [Request(tokens, 8, number) for number, (_, tokens) in enumerate(parts.heldout[:128])]
        best = 0.0
        for _ in range(3):
            started = time.perf_counter()
            tokens = sum(len(response.tokens) for response in parts.engine.generate(requests, parts.sampling))
            best = max(best, tokens / (time.perf_counter() - started))
        print(f"| {rows} | {tokens:,} | {best:,.0f} |")


if __name__ == "__main__":
    main()
