"""A process that adds small batches for ever and acknowledges each on its standard output, until it is killed."""

from __future__ import annotations

import os
import sys

from r3.buffer import SampleBuffer
from tests.buffer.helpers import make_sample


def batch(first_id: int) -> list:
    """The batch that starts with this id: its samples follow from it, so that any reader can tell what they were."""
    return [
        make_sample(first_id + i, f"q{(first_id + i) % 5}", length=1 + (first_id + i) * 37 % 700, step=first_id)
        for i in range(1 + first_id % 7)
    ]


def main() -> None:
    with SampleBuffer(sys.argv[1], per_query=None, total=None) as buffer:
        stats = buffer.stats()
        next_id = stats.samples + 1
        while True:
            ids = buffer.add(batch(next_id))
            assert ids[0] == next_id
            next_id = ids[-1] + 1
            os.write(1, f"{ids[-1]}\n".encode())


if __name__ == "__main__":
    main()
