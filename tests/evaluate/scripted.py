"""A rollout engine that writes what a script says, problems to ask it, and rewards of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from r3.evaluate.run import Benchmark
from r3.rollout.protocol import Request, Response, Sampling
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
