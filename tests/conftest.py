"""Settings shared by all tests: property tests are repeatable and have no deadline (CI machines stall)."""

import os
from pathlib import Path

# The test processes share the cores: torch in each of them, and in the runs they start, must not take all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything imports Triton: where there is no card, its kernels run in Triton's interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

settings.register_profile("r3", deadline=None, derandomize=True, max_examples=150, print_blob=True)
settings.load_profile("r3")
