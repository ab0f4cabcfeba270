"""What r3 costs where no model runs: the command's start, Algorithm 1's inner part, and the sample buffer.

    python benchmarks/without_model.py startup
    python benchmarks/without_model.py step [--tokens 2000] [--out result.json]
    python benchmarks/without_model.py buffer --samples 1000000 --out buffer.json

The predictions below were written before the first run of each.

startup: `import r3` and `r3 --help`, each in a fresh interpreter. The first under 5 ms (it loads nothing), the second
about 60 ms over Python's own start. Targets: 0.3 s and 0.5 s.

step: `r3.step` on 128 groups of 16 samples, without the buffer's time. About 8 ms. A group costs some 20 µs of Python
for rewards, advantages and weights, and a solve-none group with truncated answers 150 µs more for partitioning 2,000
entropies per sample. Target: ≤ 20 ms.

buffer: how its costs grow from ten thousand to a million samples. An `add` of 2,048 × 2,000 tokens writes 33 MB twice
(log, then file) and waits for the disk, so it takes 0.4 to 0.8 s on a disk of 300 MB/s, and hardly more at 10⁶ samples
than at 10⁴: only the index by query is touched at random places. `history` of 128 queries reads up to 512 responses,
8 MB: 25 to 40 ms from the page cache. `success_rate` and `stats` stay below 5 ms. The process grows by the page cache's
64 MB and little else.

Only calls to the buffer are timed; samples are cut from random pools. Disk: about 8.5 bytes per token. `history` is
measured on random queries, then `again` on the same ones: the first includes reading the disk wherever the operating
system has not kept the file (16 GB at 10⁶) in its page cache, the second is the buffer's own time; its CPU time is what
a machine that is busy with other work still shows truly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import r3
from r3 import Group, MethodSettings, Query, Sample, SampleBuffer

QUERIES_A_STEP = 128
GROUP = 16
VOCABULARY = 151_936
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import r3": [sys.executable, "-c", "import r3"],
    "r3.step, r3.SampleBuffer in hand": [sys.executable, "-c", "import r3; r3.step; r3.SampleBuffer"],
    "r3 --help": [sys.executable, "-m", "r3", "--help"],
    "r3 train --print-config": [sys.executable, "-m", "r3", "train", "--print-config"],
}


def main() -> None:
    """Measure the part that the command line names."""
    options = _options()
    if options.part == "startup":
        measure_startup()
    elif options.part == "step":
        measure_step(options)
    else:
        measure_buffer(options)


def measure_startup() -> None:
    """Print the median of ten runs of each command, in seconds."""
    print("| command | seconds |\n|---|---|")
    for name, command in COMMANDS.items():
        times = []
        for _ in range(10):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
        print(f"| {name} | {statistics.median(times):.3f} |")


def measure_step(options: argparse.Namespace) -> None:
    """Print a Markdown row per method."""
    batch, history = make_batch(options.groups, options.size, options.tokens)
    results = {}
    print(f"{options.groups} × {options.size} samples × {options.tokens} tokens, Python {platform.python_version()}")
    print("| method | median ms | max ms | samples to train on |\n|---|---|---|---|")
    for name in ("grpo", "dapo", "r3"):
        settings = MethodSettings(name=name)
        times = []
        for _ in range(options.repeat):
            started = time.perf_counter()
            result = r3.step(batch, settings, history=history, policy_version=300)
            times.append(1000 * (time.perf_counter() - started))
        results[name] = {"median_ms": statistics.median(times), "max_ms": max(times), "trained": len(result.weighted)}
        print(f"| {name} | {statistics.median(times):.1f} | {max(times):.1f} | {len(result.weighted)} |")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


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
        rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
        -rng.random(tokens, dtype=np.float32),
        rng.random(tokens, dtype=np.float32),
        finish="length" if not right and rng.random() < 0.25 else "stop",
        outcome=right,
        reward=1.5 if right else 0.0,
        policy_version=version,
    )


def measure_buffer(options: argparse.Namespace) -> None:
    """Fill a buffer, measure it at each power of ten, and print a Markdown table."""
    directory = Path(tempfile.mkdtemp(prefix="r3-buffer-", dir=options.dir))
    path = directory / "buffer.sqlite"
    try:
        points = grow(path, options)
    finally:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "numpy": np.__version__},
        "samples": options.samples,
        "tokens": options.tokens,
        "ragged": options.ragged,
        "points": points,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(_table(points))


def grow(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fill the buffer step by step; measure whenever it passes a power of ten."""
    n_steps = -(-options.samples // (QUERIES_A_STEP * GROUP))
    n_queries = max(QUERIES_A_STEP, options.samples // options.per_query)
    marks = [10**power for power in range(4, 10) if 10**power <= options.samples]
    random = np.random.default_rng(0)
    batches = _batches(random, n_steps, n_queries, options.tokens, options.ragged)
    points, seconds, settles = [], [], []
    seen: set[str] = set()
    first = next(batches)  # the pools are made before memory is first looked at
    before = _resident()
    with SampleBuffer(path, total=options.total) as buffer:
        for step, batch in enumerate(itertools.chain([first], batches)):
            seconds.append(_timed(lambda batch=batch: buffer.add(batch)))
            if options.total:  # as after a checkpoint: what was evicted before the last ten steps goes for good
                settles.append(_timed(lambda step=step: buffer.settle(step - 10)))
            seen.update(sample.query_id for sample in batch)
            stored = len(seconds) * QUERIES_A_STEP * GROUP
            if marks and stored >= marks[0]:
                marks.pop(0)
                points.append(_measure(buffer, random, sorted(seen), seconds[-20:], before))
                points[-1]["settle_s"] = _spread(settles[-20:]) if settles else None
                print(json.dumps(points[-1]), flush=True)
    return points


def _measure(
    buffer: SampleBuffer, random: np.random.Generator, seen: list[str], adds: list[float], before: float
) -> dict[str, Any]:
    def choose() -> list[str]:
        return random.choice(seen, QUERIES_A_STEP, replace=False).tolist()

    histories: dict[str, list[float]] = {"first": [], "again": [], "cpu": []}
    found: list[int] = []
    for _ in range(40):
        queries = choose()
        for name, times in histories.items():
            clock = time.process_time if name == "cpu" else time.perf_counter
            times.append(1e3 * _timed(lambda queries=queries: found.append(_count(buffer, queries)), clock))
    rates = []
    for _ in range(40):
        queries = choose()
        rates.append(1e3 * _timed(lambda queries=queries: buffer.success_rate(queries)))
    asked = [1e3 * _timed(buffer.stats) for _ in range(20)]
    stats = buffer.stats()
    return {
        "samples": stats.samples,
        "add_s": _spread(adds),
        "history_ms": _spread(histories["first"]),
        "history_again_ms": _spread(histories["again"]),
        "history_cpu_ms": _spread(histories["cpu"]),
        "history_samples": float(np.mean(found)),
        "success_rate_ms": _spread(rates),
        "stats_ms": _spread(asked),
        "rss_growth_mb": round(_resident() - before, 1),
        "bytes_a_token": round(os.path.getsize(buffer.path) / stats.tokens, 2),
    }


def _count(buffer: SampleBuffer, queries: list[str]) -> int:
    return sum(len(found) for found in buffer.history(queries, outcome=True, limit=4).values())


def _batches(
    random: np.random.Generator, n_steps: int, n_queries: int, n_tokens: int, ragged: bool
) -> Iterator[list[Sample]]:
    """Groups of 16, half of them right, over queries in shuffled epochs; lengths fixed, or log-normal when ragged."""
    pool = 64 * n_tokens
    tokens = random.integers(0, VOCABULARY, pool, dtype=np.int32)
    logprobs = -random.exponential(0.5, pool).astype(np.float32)
    entropies = random.exponential(0.5, pool).astype(np.float32)
    order: list[int] = []
    epoch = 0
    for step in range(n_steps):
        if len(order) < QUERIES_A_STEP:
            order, epoch = order + random.permutation(n_queries).tolist(), epoch + 1
        chosen, order = order[:QUERIES_A_STEP], order[QUERIES_A_STEP:]
        batch = []
        for query in chosen:
            for right in random.random(GROUP) < 0.5:
                length = (
                    min(8 * n_tokens, int(random.lognormal(np.log(n_tokens) - 0.32, 0.8)) + 1) if ragged else n_tokens
                )
                at = int(random.integers(pool - length))
                cut = slice(at, at + length)
                batch.append(
                    Sample(
                        query_id=f"query-{query}",
                        tokens=tokens[cut],
                        logprobs=logprobs[cut],
                        entropies=entropies[cut],
                        outcome=bool(right),
                        reward=float(right),
                        reward_parts={"correct": float(right)},
                        policy_version=step,
                        step=step,
                        epoch=epoch,
                    )
                )
        yield batch


def _timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(values)), 3),
        "p95": round(float(np.percentile(values, 95)), 3),
        "max": round(max(values), 3),
    }


def _resident() -> float:
    """Resident memory of this process in MB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS line")


def _table(points: list[dict[str, Any]]) -> str:
    titles = ["samples", "add, s (median / p95 / max of 20)", "history, ms (median / p95)", "again, ms (median / p95)"]
    titles += ["again, CPU ms", "success_rate, ms", "stats, ms", "memory growth, MB", "bytes per token"]
    lines = [titles, ["---"] * len(titles)]
    for point in points:
        add, first, again = point["add_s"], point["history_ms"], point["history_again_ms"]
        lines.append(
            [
                f"{point['samples']:,}",
                f"{add['median']:.2f} / {add['p95']:.2f} / {add['max']:.2f}",
                f"{first['median']:.0f} / {first['p95']:.0f}",
                f"{again['median']:.0f} / {again['p95']:.0f}",
                f"{point['history_cpu_ms']['median']:.0f}",
                f"{point['success_rate_ms']['median']:.1f}",
                f"{point['stats_ms']['median']:.2f}",
                f"{point['rss_growth_mb']:.0f}",
                f"{point['bytes_a_token']}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("startup")
    batch = parts.add_parser("step")
    batch.add_argument("--groups", type=int, default=128)
    batch.add_argument("--size", type=int, default=16)
    batch.add_argument("--tokens", type=int, default=2000)
    batch.add_argument("--repeat", type=int, default=30)
    batch.add_argument("--out", type=Path)
    stored = parts.add_parser("buffer")
    stored.add_argument(
        "--samples", type=int, default=1_000_000, help="how many to store in all (default: %(default)s)"
    )
    stored.add_argument("--tokens", type=int, default=2_000, help="tokens per sample (default: %(default)s)")
    stored.add_argument("--ragged", action="store_true", help="log-normal lengths with that mean, not all equal")
    stored.add_argument("--per-query", type=int, default=25, help="samples per query at the end (default: %(default)s)")
    stored.add_argument("--total", type=int, help="the buffer's limit: older samples are evicted, then settled")
    stored.add_argument("--dir", type=Path, help="where to put the buffer (default: the temporary directory)")
    stored.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
