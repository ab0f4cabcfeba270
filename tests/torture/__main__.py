"""`make torture`: seeded faults of every class, many more than CI tries, and a table of what was tried and what held.

    python -m tests.torture [--seed N] [--scale X] [CLASS …]

The same seed tries the same faults. Exit code 1: something did not hold; it is printed with what was done.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy, lists

from r3.verify import MathVerifier
from tests.torture import inputs, runs
from tests.train.tiny import ROOT, save_model

Fault = Callable[[random.Random], str | None]


class Count:
    """The count for one class of faults."""

    def __init__(self) -> None:
        self.tried = 0
        self.failures: list[str] = []

    def add(self, wrong: str | None) -> None:
        self.tried += 1
        if wrong is not None:
            self.failures.append(wrong)


def repeat(fault: Fault) -> Callable[[int, int], Count]:
    """Try a fault with one random number generator after another."""

    def run(first: int, tries: int) -> Count:
        count = Count()
        for number in range(tries):
            count.add(fault(random.Random(f"{first}/{number}")))
        return count

    return run


def drawn(strategy: SearchStrategy, fault: Callable[..., str | None]) -> Callable[[int, int], Count]:  # type: ignore[type-arg]
    """Try what hypothesis draws."""

    def run(first: int, tries: int) -> Count:
        count = Count()

        @seed(first)
        @settings(
            max_examples=tries,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def one(value: object) -> None:
            wrong = fault(value)
            count.add(None if wrong is None else f"{value!r:.300}: {wrong}")

        one()
        return count

    return run


def killed_writers(first: int, tries: int) -> Count:
    """A tiny run killed again and again at random file operations: each kill counts, the end must be exact."""
    count = Count()
    for number in range(tries):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "tests.run.faults", "often", folder, "24", str(first + number)],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
        for _ in range(int(done.stdout) if done.returncode == 0 else 1):
            count.add(None if done.returncode == 0 else done.stderr[-300:])
    return count


def hostile_answers(first: int, tries: int) -> Count:
    with MathVerifier() as verifier:
        return repeat(lambda chance: inputs.answer_fault(verifier, chance))(first, tries)


def hostile_requests(run: Path) -> Callable[[int, int], Count]:
    def requests(first: int, tries: int) -> Count:
        viewer = inputs.Viewer(run)
        try:
            return repeat(viewer.fault)(first, tries)
        finally:
            viewer.close()

    return requests


def classes(folder: Path) -> dict[str, tuple[Callable[[int, int], Count], int]]:
    """Every class by its name, with how often it is tried at scale 1."""
    override = inputs.one_override()
    return {
        "settings": (drawn(lists(override, min_size=1, max_size=3), inputs.settings_fault), 2000),
        "settings, dry run": (drawn(lists(override, min_size=1, max_size=2), inputs.dry_fault), 300),
        "recipes": (drawn(inputs.recipes(), lambda content: inputs.recipe_fault(folder, content)), 1000),
        "data rows": (drawn(inputs.data_rows(), lambda rows: inputs.rows_fault(folder, rows)), 300),
        "damaged data files": (repeat(lambda chance: inputs.damaged_file_fault(folder, chance)), 300),
        "damaged runs": (repeat(lambda chance: runs.damage_fault(folder, chance)), 300),
        "disk full in a run": (repeat(lambda chance: runs.full_disk_fault(folder, chance)), 60),
        "disk full in a checkpoint": (repeat(lambda chance: runs.checkpoint_fault(folder, chance)), 300),
        "hostile answers": (hostile_answers, 100),
        "hostile requests": (hostile_requests(folder / "whole"), 300),
        "kills of a file's writer": (killed_writers, 20),
        "kills and signals of a run": (repeat(lambda chance: runs.kill_fault(folder, chance)), 30),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make torture", description="Seeded faults; a table of tried and held.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many tries of each class")
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="only these")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="r3-torture-") as name:
        folder = Path(name)
        save_model(folder / "model")
        runs.make_runs(folder)
        print(f"seed {arguments.seed}\n{'class':<28}{'tried':>7}{'held':>7}{'seconds':>9}", flush=True)
        for title, (run, tries) in classes(folder).items():
            if arguments.classes and title not in arguments.classes:
                continue
            started = time.perf_counter()
            count = run(arguments.seed, max(1, round(tries * arguments.scale)))
            held = count.tried - len(count.failures)
            print(f"{title:<28}{count.tried:>7}{held:>7}{time.perf_counter() - started:>9.0f}", flush=True)
            failures += [f"{title}: {wrong}" for wrong in count.failures]
    print("\n".join(failures[:50]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
