"""`r3 view` on a long run: 1,000 steps × 2,048 samples (256 groups of 8), written by the real writers.

The responses are short, 16 tokens, so that the run is made in minutes; what a page of groups reads (the table of one
step) and what a sample reads (the member of one group) does not grow with the others' length. All 256 groups of a step
are saved in full, a buffer of at most a million samples beside them.

Prediction, made before measuring: server 120 MB; first paint 0.3 s, charts drawn 0.6 s; a step's table 30 ms, in the
browser 120 ms; a group 10 ms; index of all queries complete after 10 s. Targets: 300 MB, 1 s, 300 ms.

    python benchmarks/view.py make DIR [--steps 1000]
    python benchmarks/view.py measure DIR
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Process
from pathlib import Path
from typing import Any

import numpy as np

from r3 import MethodSettings, SampleBuffer, step
from r3.run import RunDirectory
from r3.samples import Group, IntArray, Query, Sample
from r3.train.record import group_summaries, rollout_rows

GROUPS, SIZE, LENGTH, QUERIES = 256, 8, 16, 40_000
ALPHABET = "0123456789+-=() abcdefghijklmnopqrstuvwxyz\n"


class Letters:
    """The little of a tokenizer that the writers use: one token a letter."""

    all_special_ids = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(ALPHABET[token] for token in tokens)


def batch(number: int) -> list[Group]:
    """The groups of a step; the method then ranks and scores them as in training."""
    rng = np.random.default_rng(number)
    groups = []
    for place in range(GROUPS):
        query = Query(f"query-{(number * GROUPS + place) % QUERIES:05d}", f"{place} + {number} = ?")
        rate = (int(query.id[-5:]) * 7919 % 100) / 100
        groups.append(Group(query, [sample(query, rate, number, rng) for _ in range(SIZE)], prompt_of(query)))
    return groups


def sample(query: Query, rate: float, number: int, rng: np.random.Generator) -> Sample:
    right = bool(rng.random() < rate * rate)
    tokens = rng.integers(0, len(ALPHABET), LENGTH).astype(np.int32)
    made = Sample(
        query.id,
        tokens,
        -rng.exponential(1, LENGTH).astype(np.float32),
        rng.exponential(1, LENGTH).astype(np.float32),
        finish="stop" if right or rng.random() < 0.8 else "length",
        step=number,
        policy_version=number - 1,
        epoch=1 + number * GROUPS // QUERIES,
    )
    return made.judged(right, float(right), "equal" if right else "different", correct=float(right))


def prompt_of(query: Query) -> IntArray:
    return np.array([ALPHABET.index(letter) for letter in "0+1="], dtype=np.int32)


def make_rollouts(folder: Path, steps: int) -> None:
    """Metrics and rollouts, through the run directory's writers."""
    settings = MethodSettings(name="r3")
    config = "method: {name: r3, ranking: {peak_fraction: 0.2}}\ntask: {name: synthetic}\n"
    with RunDirectory.create(folder, config, seed=0, command=["benchmarks/view.py"]) as run:
        run.update_info(total_steps=steps)
        for number in range(1, steps + 1):
            result = step(batch(number), settings, policy_version=number - 1)
            run.rollouts.write(number, rollout_rows(result, Letters(), GROUPS), group_summaries(result))
            run.metrics.append(number, metrics(number, dict(result.counts)))


def metrics(number: int, counts: dict[str, float]) -> dict[str, float]:
    """As many numbers as training writes, of which the curves only need the names."""
    wave = {f"filler/{i}": math.sin(number / 50 + i) for i in range(40)}
    shares = {"solve_none": counts["groups/solve_none"] / GROUPS, "solve_all": counts["groups/solve_all"] / GROUPS}
    seconds = {f"seconds/{stage}": 1 + math.sin(number / 90) ** 2 for stage in ("rollout", "update", "method")}
    curves = {key: 0.5 + 0.4 * math.sin(number / 200) for key in ("accuracy", "reward", "entropy", "truncated")}
    return {
        **wave,
        **counts,
        **shares,
        **seconds,
        **curves,
        "seconds/step": 7.0,
        "epoch": 1 + number * GROUPS // QUERIES,
    }


def make_buffer(folder: Path, steps: int) -> None:
    """The same samples through the buffer's writer."""
    with SampleBuffer(folder / "buffer.sqlite", per_query=64, total=1_000_000) as buffer:
        for number in range(1, steps + 1):
            buffer.add([replace(one, id=None) for group in batch(number) for one in group.samples])


def make(folder: Path, steps: int) -> None:
    """Both at once, on two cores."""
    writers = [Process(target=target, args=(folder, steps)) for target in (make_rollouts, make_buffer)]
    writers[0].start()
    while not (folder / "run.json").exists():
        time.sleep(0.05)
    writers[1].start()
    for writer in writers:
        writer.join()
    sizes = {
        path.name: sum(f.stat().st_size for f in ([path] if path.is_file() else path.iterdir()))
        for path in folder.iterdir()
    }
    print({name: f"{size / 1e6:.0f} MB" for name, size in sizes.items() if size > 1e6})


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """`r3 view` over the run: its address and process."""
    command = [sys.executable, "-m", "r3", "view", str(folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1], server.pid
        finally:
            server.terminate()


def memory(pid: int, field: str) -> float:
    """VmRSS or VmHWM of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started)


def measure(folder: Path) -> dict[str, Any]:
    """Everything the README's table has."""
    found: dict[str, Any] = {}
    with serving(folder) as (url, pid):
        started = time.perf_counter()

        def ask(question: str) -> Any:
            with urllib.request.urlopen(f"{url}api/{question}") as reply:
                return json.loads(reply.read())

        found |= in_browser(url, lambda: ask("state")["runs"][0])
        steps = ask("steps?run=0")["steps"]
        while ask("state")["runs"][0]["indexed"] < len(steps):
            time.sleep(0.2)
        found["index complete, s after the start"] = time.perf_counter() - started
        rng = np.random.default_rng(0)
        chosen = rng.choice(steps, 60)
        tables = [timed(lambda s=s: ask(f"step?run=0&step={s}")) for s in chosen]
        groups = [timed(lambda s=s: ask(f"group?run=0&step={s}&group={s % GROUPS}")) for s in chosen]
        samples = [timed(lambda s=s: ask(f"sample?run=0&step={s}&group={s % GROUPS}&sample=1")) for s in chosen]
        queries = [timed(lambda s=s: ask(f"query?run=0&id=query-{s:05d}")) for s in chosen]
        searches = [timed(lambda s=s: ask(f"search?run=0&step={s}&text=zz%2B1")) for s in chosen[:20]]
        for name, times in (
            ("a step's table", tables),
            ("a group", groups),
            ("a sample", samples),
            ("a query's history", queries),
            ("text search in a step", searches),
        ):
            found[f"{name}, ms (median / max)"] = (statistics.median(times), max(times))
        found["buffer page, ms"] = timed(lambda: ask("buffer?run=0"))
        found["list of queries, ms"] = timed(lambda: ask("queries?run=0&search=&order=hardest"))
        found["server memory at the end, MB (now / peak)"] = (memory(pid, "VmRSS"), memory(pid, "VmHWM"))
    return found


def in_browser(url: str, state: Callable[[], Any]) -> dict[str, Any]:
    """First paint, curves drawn, and pages of groups, as Chromium has them."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    ready = "a => document.getElementById('main').dataset.ready === a"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector(".chart canvas")
        drawn = page.evaluate("() => performance.now()")
        paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        indexed = state()["indexed"]
        pages = []
        for number in range(100, 1000, 45):
            address = f"#/0/steps/{min(number, state()['step'])}"
            pages.append(
                timed(
                    lambda a=address: (
                        page.evaluate("a => { location.hash = a; }", a),
                        page.wait_for_function(ready, arg=a),
                    )
                )
            )
        browser.close()
    return {
        "first paint, ms": paint,
        "curves drawn, ms": drawn,
        "steps indexed by then": indexed,
        "a page of groups in the browser, ms (median / max)": (statistics.median(pages), max(pages)),
    }


def main() -> None:
    """Make the run, or measure it and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder, arguments.steps)
        return
    print("| what | measured |\n|---|---|")
    for name, value in measure(arguments.folder).items():
        texts = [
            f"{one:,.1f}" if isinstance(one, float) else f"{one:,}"
            for one in (value if isinstance(value, tuple) else (value,))
        ]
        print(f"| {name} | {' / '.join(texts)} |")


if __name__ == "__main__":
    main()
