r"""Verdicts per second of the judge of code, for answers and tests of the size of MBPP's.

Prediction, made before measuring: a verdict is two forks of a process of some 20 MB (1 ms each with their end), half a
millisecond of walls for each, and about 2 ms of Python to compile an answer of ten lines and three tests: 5 ms of a
core in all, so about 400/s on two idle cores. Target: 150/s on two cores.

Seconds of a core are what the machine gave the workers and this process; on a machine that does other things at the
same time they are a better guide than verdicts per second.

    python benchmarks/sandbox.py [ROWS.jsonl] [--workers 2] [--walls auto]

ROWS.jsonl has the columns `tests`, `setup` and `reference`; without it a few problems of that size are used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from r3.samples import Query
from r3.verify import Verdict
from r3.verify.code import CodeVerifier
from r3.verify.sandbox import SandboxSettings

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


def judge_all(verifier: CodeVerifier, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """The verdicts on the rows' references, as many at a time as there are workers."""
    with ThreadPoolExecutor(verifier.settings.workers) as threads:
        return list(threads.map(lambda row: verifier.judge(Query("q", "?", columns=row), row["reference"]), rows))


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--walls", default="auto")
    options = parser.parse_args()
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


def cpu() -> float:
    """Seconds of a core that this process and its ended children have taken."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
