"""How long `import r3` and `r3 --help` take, each in a fresh interpreter.

Prediction, made before measuring: `import r3` under 5 ms (it loads nothing), `r3 --help` about 60 ms over Python's own
start. Targets: 0.3 s and 0.5 s.

    python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import r3": [sys.executable, "-c", "import r3"],
    "r3.step, r3.SampleBuffer in hand": [sys.executable, "-c", "import r3; r3.step; r3.SampleBuffer"],
    "r3 --help": [sys.executable, "-m", "r3", "--help"],
    "r3 train --print-config": [sys.executable, "-m", "r3", "train", "--print-config"],
}


def main() -> None:
    """Print the median of ten runs of each, in seconds."""
    print("| command | seconds |\n|---|---|")
    for name, command in COMMANDS.items():
        times = []
        for _ in range(10):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
        print(f"| {name} | {statistics.median(times):.3f} |")


if __name__ == "__main__":
    main()
