"""A whole training step: r3's GRPO and R³ against TRL's GRPO with vLLM in its process, same work, same card.

8 prompts × 16 responses, lengths log-normal, mean 2,500, limit 8,192, the same for every response in every system (r3:
limits of the request; TRL: a wrapper around vLLM's `generate` gives each request its own max_tokens). A quarter of the
prompts is hard, solved once in 32 tries, the others in half of all, by one rule for all. R³ asks for more: from the
second step on it also answers a reflection prompt for each hard query, so its row shows the tokens it generated.

- ours-grpo, ours-r3: `Trainer.train_step` with the native engine (--own-engine portable runs anywhere).
- trl-bf16, trl-fp32: `GRPOTrainer.train()`, vLLM colocated and asleep during the update (TRL's sleep mode), log-probs
  of the rollout and its importance correction on, as is its default. See `update.py` for what the two types mean.
- trl-generate: TRL with transformers' `generate`, which writes until the longest response of the batch ends; runs
  anywhere.

On a CPU weights are float32, or bfloat16 for names with -bf16 behind them (ours with float32 masters); neither side
recomputes activations, and CPU seconds are what to compare where other work runs.

The first step is not measured. Predictions: NOTES.md.

    python benchmarks/step.py --out results.json [--engines ours-grpo,trl-bf16] [--steps 3] [--mean 2500]
    python benchmarks/step.py --device cpu --threads 2 --shape 135m --prompts 4 --group 8 --mean 48 --limit 128 \
        --engines ours-grpo,ours-grpo-bf16,trl-generate,trl-generate-bf16 --steps 2 --out results.json
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import ours
from harness import Row, child_main, comma, finish, isolated, parser, peak_gb, reset_peak
from ours import is_right
from peers import trl_grpo
from peers.generation import own_engine
from work import SHAPES, Work, model_folder, ragged_of, random_model, word_tokenizer

ENGINES = ("ours-grpo", "ours-r3", "trl-bf16", "trl-fp32")
COLUMNS = {
    "engine": "engine",
    "seconds": "seconds per step",
    "cpu_s": "CPU seconds per step",
    "rollout_s": "rollout",
    "update_s": "update",
    "other_s": "other",
    "tokens": "tokens generated",
    "tokens_s": "tokens/s",
    "peak_gb": "peak memory, GB",
    "first_s": "first step, s",
}


def options_of() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--engines", type=comma, default=list(ENGINES), help=f"of {', '.join(ENGINES)}, trl-generate …")
    made.add_argument("--threads", type=int, help="of torch on a CPU")
    made.add_argument("--prompts", type=int, default=8)
    made.add_argument("--group", type=int, default=16)
    made.add_argument("--mean", type=float, default=2500)
    made.add_argument("--limit", type=int, default=8192)
    made.add_argument("--fixed", type=int, help="give every response this length instead")
    made.add_argument("--hard", type=float, default=0.25, help="share of hard prompts")
    made.add_argument("--steps", type=int, default=3, help="steps, the first not measured")
    made.add_argument("--rows", type=int, default=4, help="TRL: rows of a micro-batch")
    made.add_argument("--tokens", type=int, default=16_384, help="ours: token budget of a micro-batch")
    made.add_argument("--max-rows", type=int, default=256, help="ours: responses written at once")
    made.add_argument("--own-engine", default="native", help="native or portable")
    made.add_argument("--vllm-memory", type=float, default=0.4, help="vLLM's gpu_memory_utilization")
    return made.parse_args()


def the_work(options: argparse.Namespace) -> Work:
    work = ragged_of(options, seed=0)
    return replace(work, lengths=((options.fixed,) * options.group,) * options.prompts) if options.fixed else work


def row(engine: str, options: argparse.Namespace, steps: list[Row]) -> Row:
    """A row of the table: medians over the steps after the first."""
    middle = {key: statistics.median(step[key] for step in steps[1:]) for key in steps[0]}
    other = middle["seconds"] - middle["rollout_s"] - middle["update_s"]
    return {
        "engine": engine,
        **middle,
        "other_s": other,
        "tokens_s": middle["tokens"] / middle["seconds"],
        "peak_gb": peak_gb(options.device),
        "first_s": steps[0]["seconds"],
        "steps": steps,
        "work": the_work(options).describe(),
    }


def dtype_of(engine: str, device: str) -> torch.dtype:
    """The weights' type: on a card bfloat16 but for trl-fp32, on a CPU float32 but for names that end in -bf16."""
    half = engine != "trl-fp32" if device.startswith("cuda") else engine.endswith("-bf16")
    return torch.bfloat16 if half else torch.float32


def measure_ours(options: argparse.Namespace, engine: str) -> Row:
    shape, work = SHAPES[options.shape], the_work(options)
    model = random_model(shape, torch.device(options.device), dtype_of(engine, options.device))
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = ours.make_trainer(
            engine.removeprefix("ours-").removesuffix("-bf16"),
            model,
            word_tokenizer(shape.vocabulary),
            own_engine(model, options.own_engine, options.max_rows),
            work,
            Path(folder),
            hard=options.hard,
            mean=options.mean,
            limit=options.fixed + 1 if options.fixed else options.limit,  # what reaches it counts as truncated
            tokens=options.tokens,
        )
        reset_peak(options.device)
        for _ in range(options.steps):
            before = time.process_time()
            _, metrics = trainer.train_step()
            cpu = time.process_time() - before
            times = {key: metrics[f"seconds/{key}"] for key in ("step", "rollout", "update")}
            tokens = metrics["tokens/generated"]
            parts = {"rollout_s": times["rollout"], "update_s": times["update"]}
            steps.append({"seconds": times["step"], "cpu_s": cpu, **parts, "tokens": tokens})
        trainer.algorithm.buffer.close()
    return row(engine, options, steps)


def measure_trl(options: argparse.Namespace, engine: str) -> Row:
    shape, work = SHAPES[options.shape], the_work(options)
    generate = engine.startswith("trl-generate")
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as output:
        folder = model_folder(shape, Path(made), weights=torch.device(options.device))
        dtype = dtype_of(engine, options.device)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
        setup = trl_grpo.TrlSetup(
            device=options.device,
            rows=options.rows,
            group=options.group,
            limit=work.longest,
            steps=options.steps,
            folder=Path(output),
            generate="transformers" if generate else "vllm",
            vllm_memory=options.vllm_memory,
        )
        reward = functools.partial(is_right, hard=options.hard, luck=ours.LUCK)
        trainer = trl_grpo.make_trainer(setup, model, word_tokenizer(shape.vocabulary), work, reward)
        rollouts = trl_grpo.stopwatch(trainer, "_generate_single_turn", options.device)
        losses = trl_grpo.stopwatch(trainer, "_generate_and_score_completions", options.device)
        reset_peak(options.device)
        clock = trl_grpo.train(trainer, options.device)
    return row(engine, options, trl_steps(clock, rollouts, losses, work.tokens))


def trl_steps(clock: trl_grpo.Clock, rollouts: list[float], prepared: list[float], tokens: int) -> list[Row]:
    """`rollout` is generating, with vLLM's weight transfer, waking and sleeping; `update` all after the batch is ready;
    what lies between (rewards, padding, old log-probs) is `other`."""
    return [
        {"seconds": whole, "cpu_s": cpu, "rollout_s": rollout, "update_s": whole - ready, "tokens": tokens}
        for whole, cpu, rollout, ready in zip(clock.seconds, clock.cpu_seconds, rollouts, prepared, strict=True)
    ]


def measure(options: argparse.Namespace, write: Callable[[Row], Any]) -> None:
    engine = options.child
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    write(measure_ours(options, engine) if engine.startswith("ours") else measure_trl(options, engine))


def main() -> None:
    """One process an engine, then the table."""
    options = options_of()
    if options.child:
        child_main(lambda write: measure(options, write), options.child_out)
        return
    # vLLM in TRL's own process, as TRL's colocate mode wants it.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    rows = [found for engine in options.engines for found in isolated(engine, options.timeout, environment)]
    print(the_work(options).describe())
    finish(rows, COLUMNS, options.out, shape=options.shape, hard=options.hard)


if __name__ == "__main__":
    main()
