"""Drawing tokens: from a row of logits and one uniform number to a token, its log-prob and the entropy it was drawn at.

Both numbers belong to the distribution the token was really drawn from: after temperature, then top-k, then top-p, with
the tokens that are left renormalised. Tokens exactly as likely as the last one kept are kept too, so that the
distribution does not depend on how tokens happen to be numbered (top-k may therefore keep a few more than k).

The draw inverts the distribution function in float64: one uniform number decides one token, whatever the batch, and a
vocabulary of 150,000 tokens loses no tail to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from r3.rollout.protocol import Sampling

_BLOCK = 64  # uniforms drawn at a time: a call of numpy's generator costs about as much as 64 numbers from it


class Drawn(NamedTuple):
    """What was drawn for each row."""

    tokens: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32
    entropies: Tensor  # [rows] float32, in nats


def uniform_stream(seed: int, index: int) -> Iterator[float]:
    """The numbers in [0, 1) that decide response `index` of a request: the t-th decides its t-th token."""
    generator = np.random.default_rng([seed, index])
    while True:
        yield from generator.random(_BLOCK).tolist()


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of the distribution `sampling` draws from; -inf for tokens it never draws. [rows, vocab], float32."""
    scores = logits.float()
    if sampling.temperature == 0:
        return scores.log_softmax(-1)  # greedy picks from the untempered distribution; nothing is filtered
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least_kept = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least_kept, -torch.inf)
    if sampling.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_edge(scores, sampling.top_p), -torch.inf)
    return scores.log_softmax(-1)


def _nucleus_edge(scores: Tensor, top_p: float) -> Tensor:
    """The score of the least likely token among the fewest likeliest ones that together reach `top_p`. [rows, 1]"""
    descending = scores.sort(dim=-1, descending=True).values
    reached = descending.softmax(-1).double().cumsum(-1)
    needed = (reached < top_p).sum(-1, keepdim=True)  # tokens that fall short of top_p; the next one reaches it
    return descending.gather(-1, needed.clamp_(max=scores.shape[-1] - 1))


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Drawn:
    """Draw one token per row by inverting the distribution function at the row's uniform number in [0, 1).

    A row with NaN logits yields NaN for its log-prob, for the caller to refuse.
    """
    logprobs = log_distribution(logits, sampling)
    probs = logprobs.exp()
    entropies = -torch.where(probs > 0, probs * logprobs, 0).sum(-1)  # 0 · log 0 = 0, not NaN
    entropies = torch.where(probs[:, 0].isnan(), torch.nan, entropies)
    greedy = sampling.temperature == 0
    tokens = logprobs.argmax(-1) if greedy else _invert(probs.double().cumsum(-1), uniforms)
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropies)


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform · total: so its own probability is above 0."""
    total = cumulative[:, -1:]
    target = uniforms.to(cumulative.device, torch.float64, non_blocking=True)[:, None] * total
    # Just below 1 the product may round up to the total itself, which no token exceeds.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=cumulative.shape[-1] - 1)  # NaN logits would otherwise point past the vocabulary
