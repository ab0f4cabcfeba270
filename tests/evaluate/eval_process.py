"""`r3 eval` in a process of its own that may be killed: `python -m tests.evaluate.eval_process DIE_AT ARGUMENTS…`.

At its DIE_AT-th batch for responses.jsonl (0: never) the process cuts it short and kills itself with SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys

from r3.commands.eval import add_arguments
from r3.evaluate import run
from r3.run.disk import AppendFile


def arguments_of(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="r3 eval")
    add_arguments(parser)
    return parser.parse_args(given)


def die_at(batch: int) -> None:
    """Of the batches written to the log, the only file that grows here."""
    counter, append = itertools.count(1), AppendFile.append

    def deadly(self: AppendFile, record: bytes) -> None:
        if next(counter) != batch:
            append(self, record)
            return
        with self.path.open("ab") as file:
            file.write(record[:-5])
        os.kill(os.getpid(), signal.SIGKILL)

    AppendFile.append = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    run.BATCH = 4  # many small writes, so that there is something to be killed in
    die_at(int(sys.argv[1]))
    arguments = arguments_of(*sys.argv[2:])
    sys.exit(arguments.run(arguments))
