"""Samples to store, and comparisons that look at every field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from r3.buffer import SampleBuffer
from r3.samples import Context, Sample

ALL = 10**9


def make_sample(seed: int, query: str = "q", *, length: int = 20, vocabulary: int = 151_936, **fields: Any) -> Sample:
    """A sample whose every field follows from its seed; `fields` override."""
    random = np.random.default_rng(seed)
    outcome = [True, False, None][int(random.integers(3))]
    reflection = bool(random.integers(2))
    values: dict[str, Any] = {
        "tokens": random.integers(0, vocabulary, length),
        "logprobs": -random.exponential(2.0, length),
        "entropies": random.exponential(0.7, length) if random.integers(4) else None,
        "finish": "stop" if outcome else ["stop", "length"][int(random.integers(2))],
        "outcome": outcome,
        "reward": float(random.normal()),
        "reward_parts": {"correct": float(random.normal()), "length": 0.25} if random.integers(2) else {},
        "context": Context("reflection", int(random.integers(100))) if reflection else Context(),
        "policy_version": int(random.integers(50)),
        "epoch": 1 + int(random.integers(3)),
        "verdict": f"naïve ≠ {seed}",
    } | fields
    if values["outcome"]:
        values["finish"] = "stop"
    return Sample(query_id=query, **values)


def contents(sample: Sample) -> dict[str, Any]:
    """All fields but the id, arrays as exact bytes."""
    return {
        "query_id": sample.query_id,
        "tokens": sample.tokens.tobytes(),
        "logprobs": sample.logprobs.tobytes(),
        "entropies": None if sample.entropies is None else sample.entropies.tobytes(),
        "finish": sample.finish,
        "outcome": sample.outcome,
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "context": sample.context,
        "policy_version": sample.policy_version,
        "step": sample.step,
        "epoch": sample.epoch,
        "verdict": sample.verdict,
    }


def rounded(sample: Sample) -> dict[str, Any]:
    """What the buffer is expected to give back for `sample`."""
    bits = (sample.logprobs.view(np.uint32).astype(np.uint64) + 128) // 256 * 256
    entropies = sample.entropies
    return contents(sample) | {
        "logprobs": bits.astype(np.uint32).tobytes(),
        "entropies": None if entropies is None else entropies.astype(np.float16).astype(np.float32).tobytes(),
    }


def everything(buffer: SampleBuffer, queries: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Every living sample by id."""
    found = {}
    for samples in buffer.history(queries).values():
        for sample in samples:
            assert sample.id is not None
            found[sample.id] = contents(sample)
    return found


def state(buffer: SampleBuffer, queries: Iterable[str]) -> tuple[Any, ...]:
    """All that a user can see, but for sizes on disk."""
    queries = list(queries)
    stats = buffer.stats()
    counts = tuple(getattr(stats, name) for name in stats.__dataclass_fields__ if name != "bytes_on_disk")
    ledger = [buffer.attempts(queries, context=context) for context in ("plain", "reflection", None)]
    return everything(buffer, queries), ledger, counts
