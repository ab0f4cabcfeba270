"""What the machine, or the container that this process is in, leaves to it: memory and processors."""

from __future__ import annotations

import math
from pathlib import Path

import torch

GROUPS = Path("sys/fs/cgroup")
"""Where Linux's control groups are; their second version has its files here, the first a folder for each resource."""
MEMORY = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Files of a container's limit and of what it uses."""
QUOTA = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files with the time on processors that a container may use in a period, and the period."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel says is available, or what is left of the container's limit if that is less."""
    free = 2**62
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for files in MEMORY:
        limit, used = _words(root, files) or ("max", "0")
        if limit.isdigit():
            free = min(free, int(limit) - int(used))
    return max(0, free)


def allowed_processors(root: Path = Path("/")) -> int | None:
    """How many processors the container's quota amounts to, rounded up; None where there is no quota."""
    for files in QUOTA:
        quota, period = _words(root, files) or ("max", "0")
        if quota.isdigit() and int(period) > 0:
            return max(1, math.ceil(int(quota) / int(period)))
    return None


def set_threads(wanted: int | None) -> None:
    """Have torch compute with so many threads; None: one per physical core that this process may use.

    That is torch's own choice, but it knows nothing of a container's quota: with a thread for each of the machine's
    cores and time for two of them, all threads would wait for the one that is out of time.
    """
    quota = allowed_processors()
    if wanted is None and quota is not None and quota < torch.get_num_threads():
        wanted = quota
    if wanted is not None:
        torch.set_num_threads(wanted)


def _words(root: Path, files: tuple[str, ...]) -> tuple[str, str] | None:
    """The two words that these files hold between them, if they can be read."""
    try:
        first, second = " ".join((root / GROUPS / file).read_text() for file in files).split()
    except (OSError, ValueError):
        return None
    return first, second
