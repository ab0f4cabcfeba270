"""What judging adds to a rollout: the same generation with and without the maths verifier at work beside it.

The portable engine generates with a random model of Qwen2.5-0.5B's shape on a CUDA card; each response that finishes is
judged as in training (two threads, two worker processes), by a public verifier case at the end of a long text. Random
weights write no answers, so the texts judged are those cases, one for every response.

Prediction, made before measuring: 0.5 %. A verdict takes about 1 ms of another core, and the generating thread only
hands it over. Target: under 2 % when generation takes seconds.

    python benchmarks/overlap.py
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from r3.rollout import Request, Sampling
from r3.rollout.transformers import TransformersEngine
from r3.verify import MathVerifier
from verify import CASES, responses


def main() -> None:
    """Alternate the two, and print the medians."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    engine = TransformersEngine(model, max_rows=256)
    requests = [Request(np.arange(1, 65, dtype=np.int32), 8, seed) for seed in range(32)]
    # One response in 200 ends at each token: ragged, as real ones are, and no end-of-text for a random model to find.
    sampling = Sampling(max_tokens=200, stop_tokens=tuple(range(0, 151_936, 200)))
    cases = responses(CASES)
    with MathVerifier() as verifier:
        verifier.warm()
        plain, judged = [], []
        generate(engine, requests, sampling, None, cases)
        for _ in range(5):
            plain.append(generate(engine, requests, sampling, None, cases))
            judged.append(generate(engine, requests, sampling, verifier, cases))
    added = statistics.median(judged) / statistics.median(plain) - 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| 256 responses | seconds, median of 5 | each |\n|---|---|---|")
    for name, seconds in (("generated", plain), ("generated and judged", judged)):
        print(f"| {name} | {statistics.median(seconds):.2f} | {' '.join(f'{s:.2f}' for s in seconds)} |")
    print(f"\njudging adds {added:.1%}")


def generate(
    engine: TransformersEngine,
    requests: list[Request],
    sampling: Sampling,
    verifier: MathVerifier | None,
    cases: list[tuple[str, str]],
) -> float:
    """Seconds until every response is generated and, with a verifier, judged."""
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as judges:
        verdicts = []
        for number, _ in enumerate(engine.generate(requests, sampling)):
            if verifier is not None:
                verdicts.append(judges.submit(verifier.verify, *cases[number % len(cases)]))
        for verdict in verdicts:
            verdict.result()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
