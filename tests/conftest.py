"""Settings shared by all tests: property tests are repeatable and have no deadline (CI machines stall)."""

from hypothesis import settings

settings.register_profile("r3", deadline=None, derandomize=True, max_examples=150, print_blob=True)
settings.load_profile("r3")
