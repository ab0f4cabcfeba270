"""How much of the machine's memory this process may still take."""

from __future__ import annotations

from pathlib import Path

GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files of a container's limit and of what it uses, in the second and the first version of Linux's control groups."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel says is available, or what is left of the container's limit if that is less."""
    free = 2**62
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, usage in GROUPS:
        try:
            most = (root / limit.lstrip("/")).read_text().strip()
            used = int((root / usage.lstrip("/")).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            free = min(free, int(most) - used)
    return max(0, free)
