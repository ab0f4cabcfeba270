r"""What judging costs: verdicts per second of both verifiers, and what judging adds to a rollout.

    python benchmarks/judging.py maths [CASES.jsonl]
    python benchmarks/judging.py code [ROWS.jsonl] [--workers 2] [--walls auto]
    python benchmarks/judging.py rollout

The predictions below were made before measuring.

maths: verdicts per second, and a batch with hung cases in it. About 90 % of the public cases end in the fast path at
some 100 µs each (most of it outlining the text), the others cost 20 ms of sympy on one of two workers. That gives about
900/s when every answer is new, and above 10,000/s once warm, when answers have been seen before, as in a group of
responses to one query. Ten hung cases at 1 s each on two workers take 5 s, which the rest of the batch hides behind.
Targets: 1,500/s once warm; a batch of 2,048 with ten hung cases within 10 s.

code: verdicts per second for answers and tests of the size of MBPP's. A verdict is two forks of a process of some 20 MB
(1 ms each with their end), half a millisecond of walls for each, and about 2 ms of Python to compile an answer of ten
lines and three tests: 5 ms of a core in all, so about 400/s on two idle cores. Target: 150/s on two cores.
Seconds of a core are what the machine gave the workers and this process; on a machine that does other things at the
same time they are a better guide than verdicts per second. ROWS.jsonl has the columns `tests`, `setup` and `reference`;
without it a few problems of that size are used.

rollout: the same generation with and without the maths verifier at work beside it. The portable engine generates with a
random model of Qwen2.5-0.5B's shape on a CUDA card; each response that finishes is judged as in training (two threads,
two worker processes), by a public verifier case at the end of a long text. Random weights write no answers, so the
texts judged are those cases, one for every response. 0.5 %: a verdict takes about 1 ms of another core, and the
generating thread only hands it over. Target: under 2 % when generation takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from r3.rollout import Engine, Request, Sampling
from r3.samples import Query
from r3.verify import MathSettings, MathVerifier, Verdict
from r3.verify.code import CodeVerifier
from r3.verify.sandbox import SandboxSettings

CASES = Path(__file__).parents[1] / "tests" / "data" / "verifier_cases.jsonl"
BATCH = 2_048
THOUGHT = "Let us check this step again: $a_{n+1} = \\frac{1}{2} a_n + 3$ holds for each n, so we go on. "
TOKENS, CHARACTERS_PER_TOKEN = 2_000, 4
HUNG = r"\boxed{\int_0^1 \frac{\sin(x^{x^x})}{x+\ln(1+x)} dx + %d}"
VERDICTS = 600
PROBLEMS = [
    {
        "reference": "def cheapest(cost, m, n):\n    best = [[0] * (n + 1) for _ in range(m + 1)]\n"
        "    best[0][0] = cost[0][0]\n    for i in range(1, m + 1):\n        best[i][0] = best[i - 1][0] + cost[i][0]\n"
        "    for j in range(1, n + 1):\n        best[0][j] = best[0][j - 1] + cost[0][j]\n"
        "    for i in range(1, m + 1):\n        for j in range(1, n + 1):\n"
        "            best[i][j] = min(best[i - 1][j - 1], best[i - 1][j], best[i][j - 1]) + cost[i][j]\n"
        "    return best[m][n]",
        "tests": [
            "assert cheapest([[1, 2, 3], [4, 8, 2], [1, 5, 3]], 2, 2) == 8",
            "assert cheapest([[2, 3, 4], [5, 9, 3], [2, 6, 4]], 2, 2) == 12",
            "assert cheapest([[3, 4, 5], [6, 10, 4], [3, 7, 5]], 2, 2) == 16",
        ],
    },
    {
        "reference": "import re\ndef long_words(text):\n    return re.findall(r'\\b\\w{4,}\\b', text)",
        "tests": [
            "assert long_words('Please move back to stream') == ['Please', 'move', 'back', 'stream']",
            "assert long_words('an ant is in a tin') == []",
            "assert long_words('four five') == ['four', 'five']",
        ],
    },
]


def main() -> None:
    """Measure the part that the command line names."""
    options = _options()
    if options.part == "maths":
        measure_maths(options)
    elif options.part == "code":
        measure_code(options)
    else:
        measure_rollout()


def measure_maths(options: argparse.Namespace) -> None:
    """Print a Markdown table."""
    cases = responses(options.cases)
    batch = [cases[i % len(cases)] for i in range(BATCH)]
    print("| what | cases | seconds | verdicts/s |\n|---|---|---|---|")
    with MathVerifier(MathSettings(remembered=0)) as verifier:
        verifier.warm()
        report("new workers, first pass", verifier, cases)
        # Each worker's parser builds its tables as it meets expressions, and the two share the cases.
        for _ in range(4):
            verifier.verify_many(cases)
        report("warm workers, no verdict remembered", verifier, cases)
    with MathVerifier() as verifier:
        verifier.warm().verify_many(cases)
        report("verdicts remembered, as in a group of like answers", verifier, batch)
    with MathVerifier() as verifier:
        verifier.warm()
        step = BATCH // 10
        hung = {i * step: (HUNG % i, "5") for i in range(10)}
        report(
            "ten hung cases, nothing remembered before", verifier, [hung.get(i, case) for i, case in enumerate(batch)]
        )
        print(f"\nTimeouts counted: {verifier.counts()['timeout']}")


def responses(path: Path) -> list[tuple[str, str]]:
    """The cases at the end of responses of 2,000 tokens."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get("set", "public") == "public"]
    padding = (THOUGHT * (TOKENS * CHARACTERS_PER_TOKEN // len(THOUGHT) + 1))[: TOKENS * CHARACTERS_PER_TOKEN]
    ends = [f"\\boxed{{{row['prediction']}}}" if row["kind"] == "answer" else row["prediction"] for row in rows]
    return [(f"<think>{padding}</think>\n{end}", row["gold"]) for end, row in zip(ends, rows, strict=True)]


def report(name: str, verifier: MathVerifier, cases: list[tuple[str, str]]) -> None:
    started = time.perf_counter()
    verifier.verify_many(cases)
    seconds = time.perf_counter() - started
    print(f"| {name} | {len(cases)} | {seconds:.2f} | {len(cases) / seconds:,.0f} |", flush=True)


def measure_code(options: argparse.Namespace) -> None:
    """Print a Markdown table."""
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows else PROBLEMS
    rows = [rows[i % len(rows)] for i in range(VERDICTS)]
    settings = SandboxSettings(walls=options.walls, workers=options.workers, seconds=20)
    before = cpu()
    with CodeVerifier(settings) as verifier:
        walls = verifier.start()
        judge_all(verifier, rows[:50])
        started = time.perf_counter()
        verdicts = judge_all(verifier, rows)
        seconds = time.perf_counter() - started
    spent = cpu() - before  # the workers' time is known once they have ended
    print(f"{'; '.join(walls)}\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| workers | verdicts | right | verdicts/s | ms of a core per verdict |\n|---|---|---|---|---|")
    right = sum(verdict.right for verdict in verdicts)
    per_verdict = 1000 * spent / (len(rows) + 50)
    print(f"| {options.workers} | {len(rows)} | {right} | {len(rows) / seconds:,.0f} | {per_verdict:.1f} |")


def judge_all(verifier: CodeVerifier, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """The verdicts on the rows' references, as many at a time as there are workers."""
    with ThreadPoolExecutor(verifier.settings.workers) as threads:
        return list(threads.map(lambda row: verifier.judge(Query("q", "?", columns=row), row["reference"]), rows))


def cpu() -> float:
    """Seconds of a core that this process and its ended children have taken."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_rollout() -> None:
    """Alternate the two, and print the medians."""
    import torch
    import transformers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from r3.rollout.transformers import TransformersEngine

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
    engine: Engine,
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    maths = parts.add_parser("maths")
    maths.add_argument("cases", nargs="?", type=Path, default=CASES)
    code = parts.add_parser("code")
    code.add_argument("rows", nargs="?", type=Path)
    code.add_argument("--workers", type=int, default=2)
    code.add_argument("--walls", default="auto")
    parts.add_parser("rollout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
