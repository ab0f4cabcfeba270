"""Compiles kernels.c with the machine's own C compiler and keeps the library on disk.

The file needs no headers but those of C, so that this takes a second. Threads are those of torch: the library has no
OpenMP runtime of its own and finds torch's, which it then shares instead of competing with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # brings the OpenMP runtime

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
NUMBERS = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
"""Types of tensors that the loops can be compiled for, each a library of its own."""
MINUTE = 60


class Unavailable(ValueError):
    """Why the loops cannot be had on this machine."""


def folder() -> Path:
    """Where compiled libraries are kept: R3_CACHE, or r3 in the user's cache directory."""
    own = os.environ.get("R3_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "r3"


@cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """The loops over tensors of a type, compiled now if they are not there yet."""
    if dtype not in NUMBERS:
        raise Unavailable(f"the C loops take float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the C loops are for Linux on x86-64, not {platform.system()} on {platform.machine()}")
    return _loaded(_compiled((*FLAGS, *NUMBERS[dtype])))


def _compiled(flags: tuple[str, ...]) -> Path:
    """The library for this source, compiler and processor."""
    compiler = next((path for name in ("gcc", "cc") if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc)")
    place = folder()
    made = place / f"kernels-{_digest(compiler, flags)}.so"
    if made.is_file():
        return made
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as work:
            # Whole or not there, whoever else compiles at the same time.
            return _compile(compiler, flags, Path(work)).rename(made)
    except OSError as error:
        raise Unavailable(f"{place} cannot be written to ({error}); set R3_CACHE to a folder that can") from error


def _compile(compiler: str, flags: tuple[str, ...], work: Path) -> Path:
    object_file, made = str(work / "kernels.o"), work / "kernels.so"
    _run([compiler, *flags, "-c", str(SOURCE), "-o", object_file])
    _run([compiler, "-shared", object_file, "-o", str(made), "-lm"])  # without -fopenmp: the runtime is torch's
    return made


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run ({type(error).__name__})") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{command[0]} cannot compile its loops ({reason})")
    return done.stdout


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """One name per source, flags, compiler and kind of processor: a home directory may be shared by several."""
    texts = [" ".join(flags), _run([compiler, "--version"]), _processor()]
    return hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *(text.encode() for text in texts)])).hexdigest()[:20]


def _processor() -> str:
    """Model and instruction set, as -march=native sees them."""
    wanted = ("vendor_id", "cpu family", "model", "flags")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error})") from error
