"""What the GPU benchmarks share: engines in processes of their own, facts about the machine, tables and JSON.

A script calls itself once for each engine, so that each finds the card's memory empty and one that fails takes nothing
with it: its rows then say why they were not measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
PACKAGES = ("torch", "triton", "transformers", "vllm", "trl", "accelerate")
ERROR_LINES = 25
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Models are made on the spot: nothing is to be fetched or reported."""


class NotMeasured(Exception):
    """Why an engine cannot run here, and what would let it."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with what every GPU benchmark takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="1.5b", help="model: 1.5b, 7b; 135m or bundled on a CPU; tiny to try it")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--out", type=Path, help="write the figures as JSON")
    made.add_argument("--timeout", type=float, default=540, help="seconds for one engine, start-up included")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--child-out", type=Path, help=argparse.SUPPRESS)
    return made


def comma(text: str) -> list[str]:
    """`a,b` as a list, for options."""
    return [part for part in text.split(",") if part]


def isolated(
    child: str, timeout: float, environment: Mapping[str, str] | None = None, *, python: str = sys.executable
) -> list[Row]:
    """Run this script again with the same options as the process of one engine; the rows it measured.

    Rows are kept as they come, so an engine that fails or runs out of time half-way keeps those it finished.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.jsonl"
        command = [python, *sys.argv, "--child", child, "--child-out", str(result)]
        started = time.perf_counter()
        problem = _run(command, timeout, {**os.environ, **OFFLINE, **(environment or {})})
        rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    print(f"{child}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    for row in rows:  # at once: a run that is cut short later still leaves what was measured
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows if problem is None else [*rows, {"engine": child, "not measured": problem}]


def _run(command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> str | None:
    """Why the process failed, in one line, or None; the end of its output goes to stderr then."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"stopped after {timeout:.0f} s; raise --timeout or take fewer --cases"
        if code == 0:
            return None
        output.seek(0)
        lines = [line.rstrip() for line in output if line.strip()]
    print("\n".join(lines[-ERROR_LINES:]), file=sys.stderr)
    return lines[-1][:300] if lines else f"exit status {code}"


def child_main(measure: Callable[[Callable[[Row], None]], None], out: Path) -> None:
    """The body of an engine's process: what `measure` hands over is written at once."""

    def write(row: Row) -> None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    try:
        measure(write)
    except NotMeasured as reason:
        print(reason)
        raise SystemExit(1) from None


def timed(device: str, work: Callable[[], Any]) -> float:
    """Seconds that `work` takes, the card's queue emptied before and after."""
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_gb(device: str) -> float | None:
    """Most memory that torch held on the card since `reset_peak`."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.startswith("cuda") else None


def reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name, its processors and what of its instructions decides how fast products are."""
    try:
        lines = dict(map(str.strip, line.split(":", 1)) for line in cpuinfo.read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor() or "CPU"
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in lines.get("flags", "").split()]
    return f"{lines.get('model name', platform.machine())} × {len(os.sched_getaffinity(0))} ({', '.join(has)})"


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A Markdown table: `columns` maps a row's key to its heading; what was not measured says why in the last cell."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_cell(row.get(key)) for key in columns]
        if "not measured" in row:
            cells[-1] = f"not measured: {row['not measured']}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def finish(rows: Sequence[Row], columns: Mapping[str, str], out: Path | None, **more: Any) -> None:
    """Print the table and write the JSON."""
    facts = machine()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['card']}, {versions}, {facts['date']}\n")
    print(table(rows, columns))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, **more, "rows": list(rows)}, indent=1) + "\n")
