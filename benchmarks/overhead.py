"""What R³'s mechanisms cost beside GRPO: the share of a step that each stage takes, on the same samples.

Both methods run the real `Trainer` from the same seed, in turn, at a learning rate of next to nothing: the policy does
not move and the plain prompts get the same answers in both; R³ adds reflection groups and replayed samples. The stages
are those that `train_step` times: prompts (reflection prompts and their reads of the buffer), rollout, history (what
replay chooses from), method (ranking, replay, advantages), buffer (storing the samples), update.

R³ asks for more samples, and pays for them in rollout and update like any sample; its own price is the extra time in
the four other stages, the mechanisms. How far its extra samples cost more than GRPO's token by token (their prompts are
longer, which counts in the prefill and in attention) is shown beside. Means over all steps from the second epoch on,
when reflection has begun.

By default the bundled model on its own task, on any machine; --shape 1.5b takes the work of `step.py` and the native
engine instead. Predictions: NOTES.md.

    python benchmarks/overhead.py --out results.json [--steps 24] [--shape 1.5b]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ours
from harness import Row, child_main, finish, isolated, parser, table
from peers.generation import own_engine
from r3.algorithm import Algorithm
from r3.buffer import SampleBuffer
from r3.config import load_config
from r3.method.mixed import StepResult
from r3.policy.optimiser import Optimiser
from r3.policy.update import Updater
from r3.train.build import build
from r3.train.loop import Trainer
from r3.train.sampler import QueryStream, Sampler
from work import SHAPES, ragged_of, random_model, word_tokenizer

METHODS = ("grpo", "r3")
STAGES = ("prompts", "rollout", "method", "update")
MECHANISMS = ("prompts", "method")
STILL = 1e-30
"""A learning rate that moves no weight."""


def options_of() -> argparse.Namespace:
    made = parser(__doc__)
    made.set_defaults(shape="embedded")
    made.add_argument("--steps", type=int, default=24)
    made.add_argument("--threads", type=int, help="embedded: CPU threads")
    made.add_argument("--prompts", type=int, default=8, help="shapes: prompts per step")
    made.add_argument("--group", type=int, default=16, help="shapes: responses per prompt")
    made.add_argument("--mean", type=float, default=2500, help="shapes: mean length")
    made.add_argument("--limit", type=int, default=8192, help="shapes: longest response")
    made.add_argument("--hard", type=float, default=0.25, help="shapes: share of hard prompts")
    made.add_argument("--tokens", type=int, default=16_384, help="shapes: token budget of a micro-batch")
    made.add_argument("--max-rows", type=int, default=256, help="shapes: responses written at once")
    made.add_argument("--own-engine", default="native", help="shapes: native or portable")
    return made.parse_args()


def embedded_trainer(options: argparse.Namespace, method: str, folder: Path) -> Trainer:
    """The bundled model, as `r3 train` without a word would train it, but for the learning rate."""
    overrides = [f"method={method}", f"train.learning_rate={STILL}", "train.epochs=1000"]
    config = load_config(None, overrides + ([f"run.threads={options.threads}"] if options.threads else []))
    parts = build(config)
    optimiser = Optimiser(parts.policy.model.parameters(), config.train, total_updates=options.steps)
    updater = Updater(parts.policy, optimiser, config.method.objective, config.train, config.rollout.temperature)
    group, tokenizer = config.rollout.group_size, parts.policy.tokenizer
    buffer = SampleBuffer(folder / "buffer.sqlite", per_query=config.buffer.per_query, total=config.buffer.total)
    return Trainer(
        config,
        QueryStream(parts.task.train, seed=config.run.seed, epochs=config.train.epochs),
        Sampler(parts.engine, parts.task, tokenizer, parts.sampling, config.settled().reward, group),
        Algorithm(config.settled().method, buffer, tokenizer, seed=config.run.seed),
        updater,
    )


def shape_trainer(options: argparse.Namespace, method: str, folder: Path) -> Trainer:
    """A random model of a shape, on work of forced lengths."""
    shape = SHAPES[options.shape]
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    model = random_model(shape, torch.device(options.device), dtype)
    return ours.make_trainer(
        method,
        model,
        word_tokenizer(shape.vocabulary),
        own_engine(model, options.own_engine, options.max_rows),
        ragged_of(options, seed=0),
        folder,
        hard=options.hard,
        mean=options.mean,
        limit=options.limit,
        tokens=options.tokens,
        learning_rate=STILL,
    )


def measure(options: argparse.Namespace, write: Callable[[Row], None]) -> None:
    """Both methods step by step in turn, so that a busy machine slows both alike: a row a measured step."""
    make = embedded_trainer if options.shape == "embedded" else shape_trainer
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for method in METHODS:
            run = Path(folder) / method
            run.mkdir()
            trainers[method] = make(options, method, run)
        for _ in range(options.steps):
            for method, trainer in trainers.items():
                result, metrics = trainer.train_step()
                if metrics["epoch"] >= 2:
                    write({"engine": method, **facts(result, metrics)})
        for trainer in trainers.values():
            trainer.algorithm.buffer.close()
            trainer.sampler.task.judge.close()


def facts(result: StepResult, metrics: Row) -> Row:
    """What the comparison needs of a step."""
    return {
        **{stage: metrics[f"seconds/{stage}"] for stage in (*STAGES, "step")},
        "generated": metrics["tokens/generated"],
        "trained": metrics["tokens/trained"],
        "plain": sum(len(sample) for sample in result.samples if sample.context.kind == "plain"),
        "reflection groups": metrics["groups/reflection"],
        "replayed": metrics["replay/samples"],
    }


def mean_of(rows: Sequence[Row], method: str) -> Row:
    """Means over the steps of a method."""
    measured = [row for row in rows if row.get("engine") == method]
    if not measured:
        reasons = [row["not measured"] for row in rows if "not measured" in row]
        raise SystemExit(f"{method}: no step was measured: {reasons or 'raise --steps beyond the first epoch'}")
    return {
        "engine": method,
        **{key: statistics.fmean(row[key] for row in measured) for key in measured[0] if key != "engine"},
    }


def compare(grpo: Row, r3: Row) -> Row:
    """R³'s step against GRPO's: what it asks for, what that costs per token, and what the mechanisms cost."""
    mechanisms = sum(r3[stage] - grpo[stage] for stage in MECHANISMS)
    return {
        "step, R³ / GRPO": r3["step"] / grpo["step"],
        "generated tokens, R³ / GRPO": r3["generated"] / grpo["generated"],
        "rollout time a generated token, R³ / GRPO": _rate(r3, "rollout", "generated")
        / _rate(grpo, "rollout", "generated"),
        "trained tokens, R³ / GRPO": r3["trained"] / max(1.0, grpo["trained"]),
        "update time a trained token, R³ / GRPO": _rate(r3, "update", "trained") / _rate(grpo, "update", "trained"),
        "mechanisms beyond GRPO's, ms per step": 1000 * mechanisms,
        "mechanisms, % of R³'s step": 100 * mechanisms / r3["step"],
        "mechanisms, % of GRPO's step": 100 * mechanisms / grpo["step"],
        "same plain samples": "yes"
        if r3["plain"] == grpo["plain"]
        else f"no: {r3['plain']:.0f}, {grpo['plain']:.0f} tokens",
    }


def _rate(mean: Row, stage: str, tokens: str) -> float:
    return float(mean[stage]) / max(1.0, float(mean[tokens]))


def stage_rows(means: Sequence[Row]) -> list[Row]:
    """A row a stage, with its milliseconds and its share under each method."""
    rows = []
    for stage in (*STAGES, "step"):
        row: Row = {"stage": stage}
        for mean in means:
            row[f"{mean['engine']} ms"] = 1000 * mean[stage]
            row[f"{mean['engine']} share"] = f"{mean[stage] / mean['step']:.1%}"
        rows.append(row)
    return rows


def main() -> None:
    """The measuring process, then the two tables."""
    options = options_of()
    if options.child:
        child_main(lambda write: measure(options, write), options.child_out)
        return
    rows = isolated("both", options.timeout)
    grpo, r3 = (mean_of(rows, method) for method in METHODS)
    columns = {"stage": "stage", "grpo ms": "GRPO, ms", "grpo share": "share", "r3 ms": "R³, ms", "r3 share": "share"}
    compared = compare(grpo, r3)
    finish(stage_rows([grpo, r3]), columns, options.out, shape=options.shape, means=[grpo, r3], compared=compared)
    print()
    print(
        table(
            [{"what": name, "value": value} for name, value in compared.items()],
            {"what": "R³ beside GRPO", "value": ""},
        )
    )


if __name__ == "__main__":
    main()
