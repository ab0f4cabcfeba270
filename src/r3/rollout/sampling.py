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

from r3.rollout import Sampling

_BLOCK = 64  # uniforms drawn at a time: a call of numpy's generator costs about as much as 64 numbers from it
_BLOCK_OF_TOKENS = 256  # about the root of a large vocabulary
_TOGETHER = (
    2**18
)  # logits looked at together on a CPU: a megabyte, so that every pass but the first finds them in cache
_NEVER = -200.0  # its exponential is 0 in float32


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


def log_weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of the distribution that `sampling` draws from, up to a constant per row; -inf for tokens that it never
    draws. [rows, vocab], float32"""
    scores = logits.float()
    if sampling.temperature == 0:
        return scores  # greedy picks from the untempered distribution; nothing is filtered
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least_kept = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least_kept, -torch.inf)
    if sampling.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_edge(scores, sampling.top_p), -torch.inf)
    return scores


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
    uniforms = uniforms.to(logits.device, torch.float64, non_blocking=True)
    rows = max(1, _TOGETHER // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    parts = zip(logits.split(rows), uniforms.split(rows), strict=True)
    return Drawn(*map(torch.cat, zip(*(_draw(part, numbers, sampling) for part, numbers in parts), strict=True)))


def _draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Drawn:
    scores = log_weights(logits, sampling)
    below = scores - scores.amax(-1, keepdim=True)  # the best token's log-weight is 0
    below.clamp_(min=_NEVER)  # a token that is never drawn has weight 0, and 0 · -inf would be NaN
    weights = below.exp()
    total = weights.sum(-1)
    # The entropy, -Σ p log p with p = weight / total.
    entropies = (total.log() - torch.linalg.vecdot(weights, below) / total).clamp_(min=0)
    tokens = scores.argmax(-1) if sampling.temperature == 0 else _invert(weights, uniforms)
    logprobs = below.gather(-1, tokens[:, None]).squeeze(-1) - total.log()
    return Drawn(tokens, logprobs, entropies)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token in whose stretch of the distribution function each row's number lies, found block by block.

    Adding up a whole vocabulary in float64 costs more than all else about a draw. So the number first chooses a block
    of tokens, by the blocks' weights, and how far into the block it lies chooses the token.
    """
    vocabulary = weights.shape[-1]
    blocks = vocabulary // _BLOCK_OF_TOKENS
    if blocks < 2:
        return _first_above(weights.double().cumsum(-1), uniforms)[0]
    even = blocks * _BLOCK_OF_TOKENS
    by_block = weights[:, :even].unflatten(-1, (blocks, _BLOCK_OF_TOKENS)).sum(-1)
    by_block = torch.cat([by_block, weights[:, even:].sum(-1, keepdim=True)], -1)  # what is left over is the last block
    block, into = _first_above(by_block.double().cumsum(-1), uniforms)
    tokens = block[:, None] * _BLOCK_OF_TOKENS + torch.arange(_BLOCK_OF_TOKENS, device=weights.device)
    inside = weights.gather(-1, tokens.clamp(max=vocabulary - 1)).masked_fill(tokens >= vocabulary, 0)
    offset, _ = _first_above(inside.double().cumsum(-1), into)
    return (block * _BLOCK_OF_TOKENS + offset).clamp_(max=vocabulary - 1)  # NaN weights again


def _first_above(cumulative: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds uniform · total, and how far into its weight that is, in [0, 1].

    Its own weight is above 0.
    """
    total = cumulative[:, -1:]
    target = uniforms[:, None] * total
    # Just below 1 the product may round up to the total itself, which no index exceeds.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    index.clamp_(max=cumulative.shape[-1] - 1)  # NaN weights would otherwise point past the last
    end = cumulative.gather(-1, index)
    start = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp_(min=0)), 0)
    return index.squeeze(-1), ((target - start) / (end - start)).squeeze(-1)
