"""An engine whose answers are right at rates that the questions themselves state, for probes with a known truth.

A question reads `q3 plain 0.25 shown 0.50 cut 0.10?`: a plain answer is right one time in four, an answer after a shown
failure one time in two, and one in ten is cut at the limit. A cut answer begins with `g` (it will finish right) or `b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from r3.rollout import Request, Response, Sampling
from tests.tokenizing import char_tokenizer

TOKENIZER = char_tokenizer()
EOS = TOKENIZER.eos_token_id
RATES = re.compile(r"plain (\d\.\d+) shown (\d\.\d+) cut (\d\.\d+)")


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
