r"""Verdicts per second, and a batch with hung cases in it.

Prediction, made before measuring: about 90 % of the public cases end in the fast path at some 100 µs each (most of it
outlining the text), the others cost 20 ms of sympy on one of two workers. That gives about 900/s when every answer is
new, and above 10,000/s once warm, when answers have been seen before, as in a group of responses to one query. Ten hung
cases at 1 s each on two workers take 5 s, which the rest of the batch hides behind. Targets: 1,500/s once warm; a batch
of 2,048 with ten hung cases within 10 s.

    python benchmarks/verify.py [CASES.jsonl]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from r3.verify import MathSettings, MathVerifier

CASES = Path(__file__).parents[1] / "tests" / "verify" / "data" / "verifier_cases.jsonl"
BATCH = 2_048
THOUGHT = "Let us check this step again: $a_{n+1} = \\frac{1}{2} a_n + 3$ holds for each n, so we go on. "
TOKENS, CHARACTERS_PER_TOKEN = 2_000, 4
HUNG = r"\boxed{\int_0^1 \frac{\sin(x^{x^x})}{x+\ln(1+x)} dx + %d}"


def main() -> None:
    """Print a Markdown table."""
    cases = responses(Path(sys.argv[1]) if len(sys.argv) > 1 else CASES)
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
    padding = (THOUGHT * (TOKENS * CHARACTERS_PER_TOKEN // len(THOUGHT) + 1))[: TOKENS * CHARACTERS_PER_TOKEN]
    ends = [f"\\boxed{{{row['prediction']}}}" if row["kind"] == "answer" else row["prediction"] for row in rows]
    return [(f"<think>{padding}</think>\n{end}", row["gold"]) for end, row in zip(ends, rows, strict=True)]


def report(name: str, verifier: MathVerifier, cases: list[tuple[str, str]]) -> None:
    started = time.perf_counter()
    verifier.verify_many(cases)
    seconds = time.perf_counter() - started
    print(f"| {name} | {len(cases)} | {seconds:.2f} | {len(cases) / seconds:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
