"""Rollout engines that write what a script says, or answer right at known rates; problems to ask, rewards, judges.

`RatedEngine` is asked questions that state its rates, for probes with a known truth. To the question
`q3 plain 0.25 shown 0.50 cut 0.10?` one plain answer in four is right, one in two after a shown failure, and one in ten
is cut at the limit. A cut answer begins with `g` (it will finish right) or `b`.

Run as a program, this file is an `r3 eval` that may be killed: `python -m tests.scripted DIE_AT ARGUMENTS…`.
At its DIE_AT-th batch for responses.jsonl (0: never) the process cuts it short and kills itself with SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
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
EOS = TOKENIZER.eos_token_id
RATES = re.compile(r"plain (\d\.\d+) shown (\d\.\d+) cut (\d\.\d+)")


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


def judge(completion: str, **_: Any) -> bool:
    """Right if a `y` was written."""
    return "y" in completion


class RatedEngine:
    """Answers at the stated rates. `telling`: whether SERR's order puts cut answers that will finish right first."""

    exact = True

    def __init__(self, *, telling: bool = False) -> None:
        self.telling = telling
        self.tokens = 0
        self.longest_prompt = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        for place in reversed(range(len(requests))):  # the last request is answered first
            request = requests[place]
            prompt = TOKENIZER.decode(request.prompt.tolist())
            self.longest_prompt = max(self.longest_prompt, len(request.prompt))
            for index in range(request.n):
                rng = np.random.default_rng([request.seed, index])
                text, entropies = self._answer(prompt, sampling.max_tokens, rng)
                ids = TOKENIZER.encode(text, add_special_tokens=False)
                cut = len(ids) == sampling.max_tokens
                tokens = np.array(ids if cut else [*ids, EOS], np.int32)
                self.tokens += len(tokens)
                logprobs = -rng.random(len(tokens), np.float32)
                finish = "length" if cut else "stop"
                yield Response(place, index, tokens, logprobs, entropies[: len(tokens)], finish)  # type: ignore[arg-type]

    def _answer(self, prompt: str, limit: int, rng: np.random.Generator) -> tuple[str, np.ndarray]:
        entropies = rng.random(limit).astype(np.float32)
        if prompt.endswith("~"):  # a cut answer, carried on
            begun = prompt.rstrip("~")[-1]
            return ("y" if begun == "g" else "n"), entropies
        plain, shown, cut = map(float, RATES.search(prompt).groups())  # type: ignore[union-attr]
        if rng.random() < cut:
            good = rng.random() < 0.5
            if self.telling and good:  # one high peak, low elsewhere: dominates an even row of the same questions
                entropies = np.array([2.0] * 3 + [0.01] * (limit - 3), np.float32) + entropies / 100
            elif self.telling:
                entropies = np.full(limit, 1.0, np.float32) + entropies / 100
            return ("g" if good else "b") + "~" * (limit - 1), entropies
        right = rng.random() < (shown if "NOT" in prompt else plain)
        return ("y" if right else "n") * int(rng.integers(1, 4)), entropies

    def release(self) -> None:
        pass


def question(number: int, plain: float, shown: float, cut: float = 0.0) -> str:
    """A question that states its rates."""
    return f"q{number} plain {plain:.3f} shown {shown:.3f} cut {cut:.3f}?"


def arguments_of(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="r3 eval")
    add_arguments(parser)
    return parser.parse_args(given)


def die_at(batch: int) -> None:
    """At this batch of the log, the only file that grows here."""
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
