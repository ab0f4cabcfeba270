"""`r3 doctor`: what is installed and usable here, to read and to paste into a bug report."""

from __future__ import annotations

import argparse

PACKAGES = {
    "torch": "",
    "transformers": "",
    "peft": "",
    "numpy": "",
    "math-verify": "",
    "trl": "r3-rl[trl]",
    "verl": "r3-rl[verl]",
    "vllm": "r3-rl[vllm]",
    "triton": "",
    "datasets": "r3-rl[datasets]",
    "pyarrow": "r3-rl[parquet]",
    "matplotlib": "r3-rl[plots]",
    "gguf": "r3-rl[models]",
    "reasoning-gym": "r3-rl[reasoning-gym]",
    "wandb": "r3-rl[wandb]",
    "trackio": "r3-rl[trackio]",
}
"""What numbers or abilities depend on, and the extra that brings it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`r3 doctor` has no options."""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what there is; returns the exit code."""
    import platform

    from r3 import __version__

    lines = [
        ("r3", __version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        *_packages(),
        *_devices(),
        *_engines(),
        ("verifier", _verifier()),
        ("data sets", _data()),
    ]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:{width}}  {told}" for name, told in lines))
    return 0


def _packages() -> list[tuple[str, str]]:
    from importlib import metadata

    lines = []
    for package, extra in PACKAGES.items():
        try:
            lines.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            lines.append((package, "not installed" + (f" (pip install '{extra}')" if extra else "")))
    return lines


def _devices() -> list[tuple[str, str]]:
    import os

    import torch

    lines = [("processors", f"{os.cpu_count()}, torch computes with {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        return [*lines, ("cards", f"none that torch sees (it is built with {built})")]
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        memory = f"{card.total_memory / 1e9:.0f} GB"
        lines.append((f"card {number}", f"{card.name}, {memory}, CUDA {torch.version.cuda}"))
    return lines


def _engines() -> list[tuple[str, str]]:
    import torch

    from r3.rollout.native.cpu import library
    from r3.rollout.vllm import check_version, installed_version

    try:
        check_version(installed_version())
        vllm = "vllm usable"
    except ValueError as error:
        vllm = f"vllm not ({error})"
    native = "native usable"
    if not torch.cuda.is_available():
        try:
            library()
        except ValueError as error:
            native = f"native not ({error})"
    return [("engines", f"transformers usable; {native}; {vllm}")]


def _verifier() -> str:
    """Judges one answer for real, workers included."""
    from r3.verify import MathVerifier

    try:
        with MathVerifier() as verifier:
            verdict = verifier.verify(r"\boxed{\frac{x^2-1}{x-1}}", "x+1")
    except Exception as error:  # noqa: BLE001  # whatever is wrong is what this command is to tell
        return f"fails: {type(error).__name__}: {error}"
    return f"works ({verdict.reason})" if verdict.right else f"judges wrongly ({verdict.reason})"


def _data() -> str:
    import os

    from r3.errors import TaskError
    from r3.tasks.datasets import SETS, find_file

    folder = os.environ.get("R3_DATA")
    if not folder:
        return "R3_DATA is not set"
    present = []
    for name, known in SETS.items():
        try:
            find_file(known)
        except TaskError:
            continue
        present.append(name)
    return f"{folder}: {', '.join(present) or 'none of those known by name'}"
