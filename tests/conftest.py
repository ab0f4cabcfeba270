"""Settings shared by all tests: property tests are repeatable and have no deadline (CI machines stall)."""

import os

# The test processes share the cores: torch in each of them, and in the runs they start, must not take all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("r3", deadline=None, derandomize=True, max_examples=150, print_blob=True)
settings.load_profile("r3")
