"""Decoding and rollouts: tokens per second of r3's engines, transformers' `generate` and vLLM, same work, same card.

Cases: `decode-ROWSxCONTEXT` (as many different prompts of that length, 256 new tokens each, no stop token) and `ragged`
(32 prompts of 150 to 300 tokens × 16 responses at log-normal lengths, mean 2,500, limit 8,192; every response has the
same length in every engine). Weights are random (vLLM: its own dummy weights unless --vllm-weights auto).

- decode tokens/s leaves the prompts out: rows × (new − 1) over the time of the whole less that of one new token.
- tokens/s is of the whole call, prompts included; for `ragged` it counts the tokens that the work asks for.
Every case first runs once in full (compiling, capturing, allocating; `ragged` on vLLM, which does that when it starts,
with 64 tokens per response), then `--repeats` times on new prompts, so that a prefix cache holds nothing but what a
group shares. Predictions: NOTES.md.

    python benchmarks/rollout.py --out results.json [--engines native,vllm] [--cases decode-256x512,ragged] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from harness import Row, child_main, comma, finish, isolated, parser, timed
from peers.generation import FAMILIES, Generator, Setup, start
from work import SHAPES, Shape, Work, model_folder, ragged_of, uniform

CASES = ("decode-256x512", "decode-512x1024", "decode-64x4096", "ragged")
ENGINES = ("native", "generate", "generate-static", "vllm", "vllm-logprobs")
SLOW = {"generate", "generate-static", "portable"}
"""Minutes on the ragged case, at one forward a token over a padded batch."""
COLUMNS = {
    "case": "case",
    "engine": "engine",
    "decode": "decode tokens/s",
    "tokens_s": "tokens/s",
    "seconds": "seconds",
    "of_limit": "of the memory limit",
    "warm_s": "first run, s",
    "start_s": "start, s",
}
BANDWIDTH = 4.3e12
"""Bytes a second that a device-to-device copy moves on an H200, measured."""


def options_of() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--engines", type=comma, default=list(ENGINES), help=f"of {', '.join(sum(FAMILIES.values(), ()))}"
    )
    made.add_argument("--cases", type=comma, default=list(CASES), help="decode-ROWSxCONTEXT, ragged")
    made.add_argument("--new", type=int, default=256, help="new tokens of a decode case")
    made.add_argument("--prompts", type=int, default=32, help="ragged: prompts")
    made.add_argument("--group", type=int, default=16, help="ragged: responses per prompt")
    made.add_argument("--mean", type=float, default=2500, help="ragged: mean length")
    made.add_argument("--limit", type=int, default=8192, help="ragged: longest response")
    made.add_argument("--max-rows", type=int, default=512, help="responses written at once, in every engine")
    made.add_argument("--repeats", type=int, default=2, help="measured runs of a decode case; ragged is measured once")
    made.add_argument(
        "--quick", action="store_true", help="64 new tokens, 8 prompts, mean 600, limit 2,048, one repeat"
    )
    made.add_argument("--slow", action="store_true", help="the ragged case also where it takes minutes")
    made.add_argument("--vllm-memory", type=float, default=0.85, help="vLLM's gpu_memory_utilization")
    made.add_argument("--vllm-weights", default="dummy", help="vLLM's load_format: dummy, or auto for weights on disk")
    options = made.parse_args()
    if options.quick:
        options.new, options.repeats = min(options.new, 64), 1
        options.prompts, options.mean, options.limit = min(options.prompts, 8), 600, 2048
    return options


def case_work(case: str, options: argparse.Namespace, seed: int, new: int | None = None) -> Work:
    """The work of a case; another seed gives other prompts (and for `ragged` the same lengths for all engines)."""
    if case == "ragged":
        return ragged_of(options, seed)
    rows, context = rows_and_context(case)
    return uniform(rows, context, new or options.new, vocabulary=SHAPES[options.shape].vocabulary, seed=seed)


def rows_and_context(case: str) -> tuple[int, int]:
    """`decode-256x512` is 256 rows after 512 tokens of prompt."""
    try:
        rows, context = map(int, case.removeprefix("decode-").split("x"))
    except ValueError:
        raise SystemExit(f"no case {case!r}; there are ragged and decode-ROWSxCONTEXT, e.g. decode-256x512") from None
    return rows, context


def decode_limit(shape: Shape, rows: int, context: float) -> float:
    """Tokens a second if a step did nothing but read the weights and the cache once."""
    return rows * BANDWIDTH / (2 * shape.parameters + rows * context * shape.cache_bytes)


def measure_decode(engine: Generator, name: str, case: str, options: argparse.Namespace) -> Row:
    def seconds(seed: int, new: int | None = None) -> float:
        work = case_work(case, options, seed, new)
        return timed(options.device, lambda: checked(engine, name, work))

    warm = seconds(seed=1)
    first = [seconds(seed=10 + repeat, new=1) for repeat in range(options.repeats)]
    whole = [seconds(seed=20 + repeat) for repeat in range(options.repeats)]
    rows, context = rows_and_context(case)
    decode = rows * (options.new - 1) / max(1e-9, statistics.median(whole) - statistics.median(first))
    return {
        "decode": decode,
        "tokens_s": rows * options.new / statistics.median(whole),
        "seconds": statistics.median(whole),
        "of_limit": decode / decode_limit(SHAPES[options.shape], rows, context + options.new / 2),
        "warm_s": warm,
        "runs": {"first token": first, "whole": whole},
    }


def measure_ragged(engine: Generator, name: str, options: argparse.Namespace) -> Row:
    before = case_work("ragged", options, seed=1)
    if engine.ready:
        before = before.shortened(64)
    warm = timed(options.device, lambda: checked(engine, name, before))
    work = case_work("ragged", options, seed=2)
    seconds = timed(options.device, lambda: checked(engine, name, work))
    return {"tokens_s": work.tokens / seconds, "seconds": seconds, "warm_s": warm, "work": work.describe()}


def checked(engine: Generator, name: str, work: Work) -> None:
    written = engine.generate(work, name)
    if written != work.tokens:
        raise RuntimeError(f"{name} wrote {written:,} tokens where the work asks for {work.tokens:,}")


def measure(options: argparse.Namespace, family: str, write: Callable[[Row], None]) -> None:
    """All cases of a family's variants, in its own process."""
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        dummy = family != "vllm" or options.vllm_weights == "dummy"
        model_folder(shape, Path(folder), weights=None if dummy else torch.device(options.device))
        context = max(case_work(case, options, seed=2).context for case in options.cases) + 64
        setup = Setup(
            shape, Path(folder), options.device, options.max_rows, context, options.vllm_memory, options.vllm_weights
        )
        started = time.perf_counter()
        engine = start(family, setup)
        start_s = time.perf_counter() - started
        for case in options.cases:
            for name in [name for name in options.engines if name in FAMILIES[family]]:
                write({"case": case, "engine": name, **one(engine, name, case, options), "start_s": start_s})


def one(engine: Generator, name: str, case: str, options: argparse.Namespace) -> Row:
    """A row of the table, or why there is none."""
    reason = engine.runs(case_work(case, options, seed=2), name)
    if case == "ragged" and name in SLOW and not options.slow and not options.quick:
        reason = "takes minutes; add --slow"
    if reason is not None:
        return {"not measured": reason}
    return measure_ragged(engine, name, options) if case == "ragged" else measure_decode(engine, name, case, options)


def main() -> None:
    """One process a family of engines, then the table."""
    options = options_of()
    if options.child:
        child_main(lambda write: measure(options, options.child, write), options.child_out)
        return
    families = [family for family, names in FAMILIES.items() if set(names) & set(options.engines)]
    unknown = set(options.engines) - set(sum(FAMILIES.values(), ()))
    if unknown:
        raise SystemExit(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(sum(FAMILIES.values(), ()))}")
    rows = [row for family in families for row in isolated(family, options.timeout)]
    order = {case: place for place, case in enumerate(options.cases)}
    rows.sort(key=lambda row: order.get(row.get("case", ""), len(order)))
    finish(rows, COLUMNS, options.out, shape=options.shape)


if __name__ == "__main__":
    main()
