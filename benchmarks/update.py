"""The update: useful tokens per second and peak memory of r3's packed update and of TRL's GRPO, same completions.

64 completions to 4 prompts (150 to 300 tokens), log-normal, mean 2,100, limit 8,192. Useful tokens are those of prompts
and completions, padding left out; the time is of one optimiser update with everything in it. Gradient checkpointing and
torch's own attention in both.

- ours: bfloat16 weights and activations, float32 masters and AdamW state; packed by a budget of tokens.
- trl-fp32: float32 weights under bfloat16 autocast, TRL's default for a model in float32. 4 rows × 16 micro-batches.
- trl-bf16: weights, gradients and AdamW state all in bfloat16 (less memory and traffic than ours, and less exact).
- trl-fp32-old, trl-bf16-old: with the second forward over all completions that TRL makes whenever vLLM generated them.

TRL runs through `GRPOTrainer.train()`, its completions given by `rollout_func`. Every sample has a reward that differs
from its group's mean: r3 skips nothing here that TRL computes. --hard 0.5 makes half of the prompts unsolvable instead,
whose samples have advantage 0: r3 leaves them out, TRL pads and computes them. Predictions: NOTES.md.

    python benchmarks/update.py --out results.json [--engines ours,trl-fp32] [--steps 3] [--hard 0.5]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from harness import Row, child_main, comma, finish, isolated, parser, peak_gb, reset_peak, timed
from ours import is_right, make_updater, weighted_samples
from peers.trl_grpo import TrlSetup, completion_tokens, make_trainer, train
from work import EOS, SHAPES, Work, ragged_of, random_model, word_tokenizer

ENGINES = ("ours", "trl-fp32", "trl-bf16", "trl-fp32-old", "trl-bf16-old")
COLUMNS = {
    "engine": "engine",
    "useful_s": "useful tokens/s",
    "seconds": "seconds per update",
    "peak_gb": "peak memory, GB",
    "computed": "tokens computed, padding included",
    "first_s": "first update, s",
}


def options_of() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--engines", type=comma, default=list(ENGINES), help=f"of {', '.join(ENGINES)}")
    made.add_argument("--prompts", type=int, default=4)
    made.add_argument("--group", type=int, default=16)
    made.add_argument("--mean", type=float, default=2100)
    made.add_argument("--limit", type=int, default=8192)
    made.add_argument("--rows", type=int, default=4, help="TRL: rows of a micro-batch")
    made.add_argument("--tokens", type=int, default=16_384, help="ours: token budget of a micro-batch")
    made.add_argument("--hard", type=float, default=0.0, help="share of prompts that nobody solves")
    made.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    made.add_argument("--steps", type=int, default=3, help="updates, the first not measured")
    return made.parse_args()


def useful_tokens(work: Work) -> int:
    return work.tokens + sum(len(prompt) * len(row) for prompt, row in zip(work.prompts, work.lengths, strict=True))


def result(engine: str, work: Work, seconds: list[float], computed: int, device: str) -> Row:
    """A row of the table: the median update after the first."""
    median = statistics.median(seconds[1:])
    return {
        "engine": engine,
        "useful_s": useful_tokens(work) / median,
        "seconds": median,
        "peak_gb": peak_gb(device),
        "computed": computed,
        "first_s": seconds[0],
        "runs": seconds,
        "work": work.describe(),
        "useful": useful_tokens(work),
    }


def measure_ours(options: argparse.Namespace) -> Row:
    shape, work = SHAPES[options.shape], ragged_of(options, options.seed)
    tokenizer = word_tokenizer(shape.vocabulary)
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    updater = make_updater(random_model(shape, torch.device(options.device), dtype), tokenizer, options.tokens)
    reward = functools.partial(is_right, hard=options.hard)
    completion = functools.partial(completion_tokens, eos=EOS)
    weighted = weighted_samples(work, completion, reward, tokenizer)
    if not weighted:
        raise SystemExit("no group has variance: lower --hard")
    reset_peak(options.device)
    seconds = [
        timed(options.device, lambda number=number: updater.update(weighted, version=number, seed=(0, number)))
        for number in range(options.steps)
    ]
    computed = sum(len(w.prompt) + len(w.sample) for w in weighted)
    return result("ours", work, seconds, computed, options.device)


def measure_trl(options: argparse.Namespace, engine: str) -> Row:
    shape, work = SHAPES[options.shape], ragged_of(options, options.seed)
    dtype = torch.bfloat16 if "bf16" in engine else torch.float32
    model = random_model(shape, torch.device(options.device), dtype)
    reward = functools.partial(is_right, hard=options.hard)
    with tempfile.TemporaryDirectory() as folder:
        setup = TrlSetup(
            device=options.device,
            rows=options.rows,
            group=options.group,
            limit=options.limit,
            steps=options.steps,
            folder=Path(folder),
            old_logprobs=engine.endswith("old"),
        )
        trainer = make_trainer(setup, model, word_tokenizer(shape.vocabulary), work, reward)
        reset_peak(options.device)
        seconds = train(trainer, options.device).seconds
    padded = options.prompts * options.group * (max(map(len, work.prompts)) + work.longest)
    return result(engine, work, seconds, padded * (2 if engine.endswith("old") else 1), options.device)


def measure(options: argparse.Namespace, write: Callable[[Row], None]) -> None:
    engine = options.child
    write(measure_ours(options) if engine == "ours" else measure_trl(options, engine))


def main() -> None:
    """One process an engine, then the table."""
    options = options_of()
    if options.child:
        child_main(lambda write: measure(options, write), options.child_out)
        return
    rows = [row for engine in options.engines for row in isolated(engine, options.timeout)]
    work = ragged_of(options, options.seed)
    print(f"{work.describe()}; {useful_tokens(work):,} useful tokens")
    finish(rows, COLUMNS, options.out, shape=options.shape)


if __name__ == "__main__":
    main()
