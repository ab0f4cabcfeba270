"""A rollout engine that writes what a script says, problems to ask it, and rewards of a user's own.

Run as a program, this file is an `r3 eval` that may be killed: `python -m tests.evaluate.scripted DIE_AT ARGUMENTS…`.
At its DIE_AT-th batch for responses.jsonl (0: never) the process cuts it short and kills itself with SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from r3.commands.eval import add_arguments
from r3.evaluate import run
from r3.evaluate.run import Benchmark
from r3.rollout import Request, Response, Sampling
from r3.run.disk import AppendFile
from r3.samples import IntArray, Query
from r3.verify.judge import PlainJudge, Verdict
from tests.tokenizing import char_tokenizer

SAMPLING = Sampling(max_tokens=12, stop_tokens=(1,), temperature=0.6)
TOKENIZER = char_tokenizer()


class ScriptedEngine:
    """Answers by a function of the prompt's text and the seed; the last request is answered first."""

    def __init__(self, script: Callable[[str, int], str], *, fail_after: int | None = None) -> None:
        self.script, self.fail_after = script, fail_after
        self.answered: list[tuple[str, int]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        for place in reversed(range(len(requests))):
            request = requests[place]
            prompt = TOKENIZER.decode(request.prompt.tolist())
            if len(self.answered) == self.fail_after:
                raise RuntimeError("the card fell off the bus")
            self.answered.append((prompt, request.seed))
            ids = [*TOKENIZER.encode(self.script(prompt, request.seed), add_special_tokens=False), 1]
            finish = "stop" if len(ids) <= sampling.max_tokens else "length"
            tokens = np.array(ids[: sampling.max_tokens], np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            yield Response(place, 0, tokens, zeros, zeros, finish)  # type: ignore[arg-type]

    def release(self) -> None:
        pass


def encode(query: Query) -> IntArray:
    assert isinstance(query.prompt, str)
    return np.array(TOKENIZER.encode(query.prompt, add_special_tokens=False), np.int32)


def is_the_answer(query: Query, completion: str) -> Verdict:
    right = completion.strip() == query.answer
    return Verdict(right, "match" if right else "other")


def sums(name: str, count: int) -> Benchmark:
    """`count` problems whose answers are their numbers."""
    queries = [Query(f"{name}-{i}", f"{name} {i}=", str(i), {"problem": f"{name} {i}="}) for i in range(count)]
    return Benchmark(name, name.upper(), queries, PlainJudge(is_the_answer), extract=str.strip)


def graded(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """As `tests.train.tiny.judge`, and worth less than that makes right by default."""
    shares = zip(completions, answer, strict=True)
    return [0.4 * (bool(text) and (ord(text[0]) * 7919 % 100) < float(share)) for text, share in shares]


def brief(completion: str) -> float:
    return 1 / (1 + len(completion))


def never(completion: str, **_: Any) -> bool:
    return False


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
