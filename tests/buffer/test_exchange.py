"""Export and import: the same buffer on the other side, clear refusals of anything else; and the stored arrays.

Covers r3.buffer.codec.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from r3.buffer import SampleBuffer, SampleBufferError, codec
from tests.buffer.helpers import make_sample, state

QUERIES = [f"q{i}" for i in range(5)]
SUFFIXES = [".jsonl", ".jsonl.gz", ".parquet"]
LIMITS = {"per_query": 4, "total": 15}


@pytest.fixture
def buffer(tmp_path):
    with SampleBuffer(tmp_path / "buffer.sqlite", **LIMITS) as buffer:
        buffer.add(make_sample(i, f"q{i % 5}", length=1 + i, step=i // 8) for i in range(60))
        buffer.settle(3)
        yield buffer


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_is_exact_down_to_rewinds(buffer, tmp_path, suffix):
    file, again = tmp_path / f"export{suffix}", tmp_path / f"again{suffix}"
    n = buffer.export(file)
    assert n == buffer.stats().samples + buffer.stats().evicted
    with SampleBuffer(":memory:", **LIMITS) as copy:
        assert copy.import_(file) == n
        assert state(copy, QUERIES) == state(buffer, QUERIES)
        assert copy.check() == []
        copy.export(again)
        if suffix == ".jsonl":
            assert again.read_bytes() == file.read_bytes()
        assert copy.forget_after(5) == buffer.forget_after(5)
        assert state(copy, QUERIES) == state(buffer, QUERIES)
        new = [make_sample(99, "q0", step=6), make_sample(100, "new", step=6)]
        assert copy.add(new) == buffer.add(new)
        assert state(copy, [*QUERIES, "new"]) == state(buffer, [*QUERIES, "new"])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_buffer_round_trips(tmp_path, suffix):
    file = tmp_path / f"export{suffix}"
    with SampleBuffer(":memory:") as empty, SampleBuffer(":memory:") as copy:
        assert empty.export(file) == 0
        assert copy.import_(file) == 0
        assert copy.add([make_sample(1)]) == [1]


def test_jsonl_is_readable_by_anyone(buffer, tmp_path):
    file = tmp_path / "export.jsonl"
    buffer.export(file)
    header, *records = map(json.loads, file.read_text().splitlines())
    assert (header["format"], header["version"]) == ("r3-samples", 1)
    (newest,) = buffer.history(["q4"], limit=1)["q4"]
    record = next(record for record in records if record["id"] == newest.id)
    assert record["tokens"] == newest.tokens.tolist()
    assert record["logprobs"] == pytest.approx(newest.logprobs.tolist(), rel=1e-5)
    assert record["outcome"] == newest.outcome


def _edit(**fields):
    def edit(lines):
        record = json.loads(lines[3])
        lines[3] = json.dumps({name: value for name, value in (record | fields).items() if value != "REMOVE"})

    return edit


def _flip_outcome(lines):
    record = json.loads(lines[3])
    lines[3] = json.dumps(record | {"outcome": False if record["outcome"] is None else None})


def _cut_last(lines):
    del lines[-1]


def _break_line(lines):
    lines[3] = lines[3][: len(lines[3]) // 2]


def _edit_header(**fields):
    def edit(lines):
        lines[0] = json.dumps(json.loads(lines[0]) | fields)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_edit(reward="high"), "line 4: field 'reward' must be int or float"),
        (_edit(reward="REMOVE"), "line 4: field 'reward' is missing"),
        (_edit(reward=float("nan")), "line 4: .*reward nan"),
        (_edit(step=True), "line 4: field 'step'"),
        (_edit(tokens=[1, 2]), "line 4: .*logprobs"),
        (_edit(tokens=["a"]), "line 4: .*tokens"),
        (_edit(query_id="other"), "line 4: field 'query_id'"),
        (_edit(id=1), "line 4: field 'id'"),
        (_edit(finish="cut"), "line 4: .*finish"),
        (_break_line, "line 4 cannot be read"),
        (_cut_last, "do not add up"),
        (_flip_outcome, "do not add up"),
        (_edit_header(version=9), "version 9.*upgrade"),
        (_edit_header(format="other"), "header"),
        (_edit_header(steps=[[1]]), "header"),
        (_edit_header(queries=[["q"]]), "header"),
        (lambda lines: lines.clear(), "empty"),
    ],
)
def test_a_bad_import_names_the_place_and_imports_nothing(buffer, tmp_path, edit, message):
    file = tmp_path / "export.jsonl"
    buffer.export(file)
    lines = file.read_text().splitlines()
    edit(lines)
    file.write_text("".join(line + "\n" for line in lines))
    with SampleBuffer(tmp_path / "copy.sqlite") as copy:
        with pytest.raises(SampleBufferError, match=message) as raised:
            copy.import_(file)
        assert str(file) in str(raised.value)
        assert copy.stats().samples == copy.stats().queries == 0
        assert copy.add([make_sample(1)]) == [1]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"neither", bytes(range(256)) * 9])
def test_files_of_others_are_refused(tmp_path, suffix, content):
    file = tmp_path / f"theirs{suffix}"
    file.write_bytes(content)
    with SampleBuffer(":memory:") as buffer, pytest.raises(SampleBufferError, match=str(file)):
        buffer.import_(file)


def test_a_cut_gzip_is_refused(buffer, tmp_path):
    file = tmp_path / "export.jsonl.gz"
    buffer.export(file)
    file.write_bytes(file.read_bytes()[:-200])
    with SampleBuffer(":memory:") as copy, pytest.raises(SampleBufferError, match="cannot be read"):
        copy.import_(file)


def test_parquet_without_pyarrow_names_the_extra(buffer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SampleBufferError, match=r"r3-rl\[parquet\]"):
        buffer.export(tmp_path / "export.parquet")
    assert os.listdir(tmp_path) == [name for name in os.listdir(tmp_path) if name.startswith("buffer.sqlite")]


def test_refusals(buffer, tmp_path):
    buffer.export(tmp_path / "export.jsonl")
    with pytest.raises(SampleBufferError, match="holds samples already"):
        buffer.import_(tmp_path / "export.jsonl")
    with pytest.raises(SampleBufferError, match="suffix"):
        buffer.export(tmp_path / "export.csv")
    with pytest.raises(SampleBufferError, match="export failed"):
        buffer.export(tmp_path / "missing" / "export.jsonl")
    with SampleBuffer(":memory:") as copy, pytest.raises(SampleBufferError, match="no such file"):
        copy.import_(tmp_path / "missing.jsonl")


# The stored arrays: what comes back, how exact it is, and what is refused.


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
