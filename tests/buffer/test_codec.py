"""The stored arrays: what comes back, how exact it is, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from r3.buffer import codec

lengths = st.integers(1, 50)


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    n = draw(lengths)
    largest = draw(st.sampled_from([255, 65_535, 65_536, codec.MAX_TOKEN]))
    tokens = draw(arrays.arrays(np.int32, n, elements=st.integers(0, largest)))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    logprobs = draw(arrays.arrays(np.float32, n, elements=finite))
    entropy = st.floats(0, codec.MAX_ENTROPY, width=32)
    entropies = draw(st.none() | arrays.arrays(np.float32, n, elements=entropy))
    return tokens, logprobs, entropies


@given(trajectories())
def test_round_trip_stays_within_the_documented_errors(trajectory):
    tokens, logprobs, entropies = trajectory
    got_tokens, got_logprobs, got_entropies = codec.decode(codec.encode(tokens, logprobs, entropies))
    assert got_tokens.dtype == np.int32
    assert got_tokens.tolist() == tokens.tolist()
    assert np.isfinite(got_logprobs).all()
    exact, near = logprobs.astype(np.float64), got_logprobs.astype(np.float64)
    # Twice the bound only within one rounding step of the largest float32, where rounding up would give infinity.
    bound = np.where(np.abs(exact) > 3.4e38, 2.0**-15, 2.0**-16)
    assert (np.abs(near - exact) <= bound * np.abs(exact) + 2.0**-142).all()
    assert (got_entropies is None) == (entropies is None)
    if entropies is not None:
        assert (
            np.abs(got_entropies.astype(np.float64) - entropies) <= np.maximum(2.0**-11 * entropies, 2.0**-25)
        ).all()


@given(trajectories())
def test_rounding_is_idempotent(trajectory):
    blob = codec.encode(*trajectory)
    assert codec.encode(*codec.decode(blob)) == blob


@pytest.mark.parametrize(
    ("vocabulary", "entropies", "size"), [(65_536, True, 7), (151_936, True, 8), (151_936, False, 6)]
)
def test_bytes_a_token(vocabulary, entropies, size):
    n = 2_000
    tokens = np.arange(vocabulary - n, vocabulary, dtype=np.int32)
    values = np.ones(n, np.float32)
    assert len(codec.encode(tokens, -values, values if entropies else None)) == n * size + 8


@pytest.mark.parametrize(
    ("tokens", "logprobs", "entropies", "message"),
    [
        ([2**24], [-1.0], [0.5], "tokens"),
        ([-1], [-1.0], [0.5], "tokens"),
        ([], [], [], "tokens"),
        ([1, 2], [-1.0], [0.5, 0.5], "logprobs"),
        ([1], [np.nan], [0.5], "logprobs"),
        ([1], [-np.inf], [0.5], "logprobs"),
        ([1], [-1.0], [np.nan], "entropies"),
        ([1], [-1.0], [70_000.0], "entropies"),
        ([1], [-1.0], [0.5, 0.5], "entropies"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tokens, logprobs, entropies, message):
    with pytest.raises(ValueError, match=message):
        codec.encode(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(entropies, np.float32))


@given(st.binary(max_size=40))
def test_a_malformed_blob_is_an_error_or_whole(blob):
    try:
        tokens, logprobs, _ = codec.decode(blob)
    except ValueError:
        return
    assert len(tokens) == len(logprobs)
