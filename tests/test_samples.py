"""The currency refuses what would corrupt training, and cannot be changed after the fact."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from r3.samples import Context, Group, Query, Sample

GOOD: dict[str, Any] = {"query_id": "q", "tokens": [1, 2], "logprobs": [-0.1, -0.2], "entropies": [0.3, 0.4]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-0.1]}, "2 tokens but 1 logprobs"),
        ({"entropies": [0.1, 0.2, 0.3]}, "2 tokens but 3 entropies"),
        ({"logprobs": [-0.1, float("nan")]}, "NaN or infinite logprobs"),
        ({"entropies": [0.1, float("inf")]}, "NaN or infinite entropies"),
        ({"tokens": [], "logprobs": [], "entropies": []}, "no tokens"),
        ({"tokens": [1, -2]}, "negative token id"),
        ({"tokens": [1.0, 2.5]}, "must be integers"),
        ({"tokens": [[1, 2]]}, "one-dimensional"),
        ({"query_id": ""}, "id of its query"),
        ({"reward": float("nan")}, "must be finite"),
        ({"finish": "eos"}, "'stop' or 'length'"),
        ({"finish": "length", "outcome": True}, "cannot be verified"),
    ],
)
def test_bad_samples_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**{**GOOD, **change})


def test_samples_are_frozen_down_to_their_arrays() -> None:
    mine = np.array([1, 2], dtype=np.int32)
    sample = Sample(**{**GOOD, "tokens": mine})
    with pytest.raises(FrozenInstanceError):
        sample.reward = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        sample.tokens[0] = 5
    mine[0] = 9  # the caller's own array stays writable
    assert sample.logprobs.dtype == np.float32


def test_equal_answers_have_equal_fingerprints() -> None:
    one, other = Sample(**GOOD), Sample(**{**GOOD, "logprobs": [-1.0, -1.0]})
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != replace(one, tokens=np.array([2, 1])).fingerprint


def test_a_verdict_makes_a_new_sample() -> None:
    sample = Sample(**GOOD)
    judged = sample.judged(True, 1.9, "match", correct=1.0, length=0.9)
    assert sample.outcome is None
    assert (judged.outcome, judged.reward, dict(judged.reward_parts)) == (True, 1.9, {"correct": 1.0, "length": 0.9})


def test_groups_hold_one_query_under_one_prompt() -> None:
    query, sample = Query("q", "1+1="), Sample(**GOOD)
    with pytest.raises(ValueError, match="is empty"):
        Group(query, (), np.array([1]))
    with pytest.raises(ValueError, match="sample of query 'other'"):
        Group(query, (replace(sample, query_id="other"),), np.array([1]))
    with pytest.raises(ValueError, match="never share a baseline"):
        Group(query, (replace(sample, context=Context("reflection", 3)),), np.array([1]))


def test_contexts_are_checked() -> None:
    with pytest.raises(ValueError, match="shows no past sample"):
        Context("plain", 3)
    with pytest.raises(ValueError, match="plain, reflection, hint, critique"):
        Context("replay")  # type: ignore[arg-type]


def test_queries_need_an_id() -> None:
    with pytest.raises(ValueError, match="non-empty id"):
        Query("", "1+1=")
