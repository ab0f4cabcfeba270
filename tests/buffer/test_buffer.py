"""The buffer as its users see it: what goes in comes out, filtered and limited as asked.

Covers r3.buffer.store, r3.buffer.counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from r3.buffer import Attempts, SampleBuffer, SampleBufferError, Stats
from r3.samples import PLAIN, Context, Sample
from tests.buffer.helpers import contents, everything, make_sample, rounded, state


@pytest.fixture(params=["file", "memory"])
def buffer(request, tmp_path):
    path = ":memory:" if request.param == "memory" else tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        yield buffer


def test_samples_come_back_with_every_field(buffer):
    samples = [make_sample(seed, f"q{seed % 7}", length=1 + seed) for seed in range(60)]
    ids = buffer.add(samples)
    assert ids == list(range(1, 61))
    assert everything(buffer, {f"q{i}" for i in range(7)}) == dict(zip(ids, map(rounded, samples), strict=True))
    assert buffer.check() == []


def test_they_are_still_there_after_reopening(tmp_path):
    path = tmp_path / "a # strange % name?.sqlite"
    with SampleBuffer(path) as buffer:
        buffer.add([make_sample(1), make_sample(2)])
    with SampleBuffer(path) as buffer:
        assert buffer.add([make_sample(3)]) == [3]
        assert [sample.id for sample in buffer.history(["q"])["q"]] == [3, 2, 1]


def test_numpy_scalars_are_stored_as_numbers(buffer):
    fields = {"outcome": np.bool_(True), "reward": np.float32(0.5), "step": np.int64(3), "policy_version": np.int32(4)}
    buffer.add([make_sample(0, reward_parts={"correct": np.float64(1.0)}, **fields)])
    (sample,) = buffer.history(["q"])["q"]
    assert (sample.outcome, sample.reward, sample.step, sample.policy_version) == (True, 0.5, 3, 4)


def test_history_is_newest_first_with_a_key_for_every_query(buffer):
    buffer.add([make_sample(seed, query) for seed, query in enumerate("abab")])
    found = buffer.history(["b", "unknown", "a", "b"])
    assert list(found) == ["b", "unknown", "a"]
    assert [[sample.id for sample in samples] for samples in found.values()] == [[4, 2], [], [3, 1]]
    assert buffer.history([]) == {}


def test_history_filters(buffer):
    plain, reflection = Context(), Context("reflection", 1)
    same = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "entropies": None}
    buffer.add(
        [
            make_sample(1, outcome=True, context=plain, policy_version=1, **same),
            make_sample(2, outcome=False, context=plain, policy_version=2),
            make_sample(3, outcome=None, context=plain, policy_version=3),
            make_sample(4, outcome=True, context=reflection, policy_version=4, **same),
            make_sample(5, outcome=True, context=plain, policy_version=5),
        ]
    )

    def ids(**filters):
        return [sample.id for sample in buffer.history(["q"], **filters)["q"]]

    assert ids() == [5, 4, 3, 2, 1]
    assert ids(outcome=True) == [5, 4, 1]
    assert ids(outcome=False) == [2]
    assert ids(context="plain") == [5, 3, 2, 1]
    assert ids(context="reflection") == [4]
    assert ids(since_version=3) == [5, 4, 3]
    assert ids(distinct=True) == [5, 4, 3, 2]
    assert ids(limit=2) == [5, 4]
    assert ids(limit=0) == []
    assert ids(outcome=True, distinct=True, limit=5) == [5, 4]
    assert ids(outcome=True, distinct=True, context="plain") == [5, 1]
    with pytest.raises(ValueError, match="limit"):
        ids(limit=-1)
    with pytest.raises(ValueError, match="context"):
        ids(context="other")
    with pytest.raises(ValueError, match=r"\['q'\]"):
        buffer.history("q")


def test_success_rate_counts_every_verified_attempt_ever_made(tmp_path):
    with SampleBuffer(tmp_path / "buffer.sqlite", per_query=2) as buffer:
        plain, reflection = Context(), Context("reflection")
        buffer.add([make_sample(seed, outcome=seed == 0, context=plain) for seed in range(8)])
        buffer.add(
            [make_sample(8, outcome=True, context=reflection, step=1), make_sample(9, "u", outcome=None, step=1)]
        )
        assert buffer.success_rate(["q", "u", "never"]) == {"q": 1 / 8}
        assert buffer.success_rate(["q"], context="reflection") == {"q": 1.0}
        assert buffer.attempts(["q"], context=None) == {"q": Attempts(tried=9, solved=2)}
        assert buffer.attempts(["q"], context=None, since_step=1) == {"q": Attempts(tried=1, solved=1)}


def test_stats(buffer):
    assert buffer.stats() == Stats(0, 0, 0, 0, 0, 0, 0, 0, None, None, None, buffer.stats().bytes_on_disk)
    buffer.add(
        [
            make_sample(1, "a", outcome=True, length=10, policy_version=3, step=2),
            make_sample(2, "a", outcome=False, length=20, policy_version=9, finish="length", step=2),
            make_sample(3, "b", outcome=None, length=30, policy_version=4, finish="stop", step=5),
        ]
    )
    stats = buffer.stats()
    size = 0 if buffer.path == ":memory:" else os.path.getsize(buffer.path) + os.path.getsize(buffer.path + "-wal")
    assert stats == Stats(
        samples=3,
        right=1,
        wrong=1,
        unverified=1,
        truncated=1,
        tokens=60,
        evicted=0,
        queries=2,
        oldest_step=2,
        newest_step=5,
        newest_policy_version=9,
        bytes_on_disk=size,
    )


def test_adding_nothing_does_nothing(buffer):
    assert buffer.add([]) == []
    assert buffer.add(iter([])) == []
    assert buffer.stats().newest_step is None


def _nan_after_the_check():
    logprobs = np.full(4, -1.0, np.float32)
    sample = make_sample(0, tokens=[1, 2, 3, 4], logprobs=logprobs, entropies=None)
    logprobs[2] = np.nan  # the engine wrote into its array again
    return sample


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_nan_after_the_check, "logprobs: NaN"),
        (lambda: make_sample(0, tokens=[2**24], logprobs=[-1.0], entropies=None), "tokens: ids"),
        (lambda: make_sample(0, length=2, entropies=[1.0, 1e6]), "entropies"),
        (lambda: make_sample(0, verdict="\ud800"), "surrogates"),
        (lambda: make_sample(0, "\ud800"), "surrogates"),
        (lambda: make_sample(0, policy_version=-1), "policy_version"),
        (lambda: make_sample(0, epoch=2**63), "epoch"),
        (lambda: make_sample(0, reward_parts={"length": float("nan")}), "JSON"),
        (lambda: make_sample(0, id=7), "already has id 7"),
    ],
)
def test_a_bad_sample_is_refused_and_none_of_its_batch_is_stored(buffer, bad, message):
    buffer.add([make_sample(1)])
    before = state(buffer, ["q"])
    with pytest.raises(SampleBufferError, match=message) as raised:
        buffer.add([make_sample(2), make_sample(3, "new query"), bad()])
    assert str(raised.value).startswith(buffer.path)
    assert state(buffer, ["q"]) == before
    assert buffer.add([make_sample(4)]) == [2]
    assert buffer.check() == []


def test_steps_do_not_go_back(buffer):
    buffer.add([make_sample(1, step=5), make_sample(2, step=6)])
    with pytest.raises(SampleBufferError, match=r"forget_after\(4\)"):
        buffer.add([make_sample(3, step=6), make_sample(4, step=5)])
    assert buffer.stats().samples == 2


@pytest.mark.parametrize("limits", [{"per_query": 0}, {"total": -1}])
def test_limits_must_be_positive(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        SampleBuffer(":memory:", **limits)


def test_readers_read_only(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as writer, SampleBuffer.open_reader(path) as reader:
        assert reader.history(["q"]) == {"q": []}
        writer.add([make_sample(1)])
        assert [contents(sample) for sample in reader.history(["q"])["q"]] == [rounded(make_sample(1))]
        assert reader.stats() == writer.stats()
        for write in (lambda: reader.add([make_sample(2)]), lambda: reader.forget_after(0), lambda: reader.settle(0)):
            with pytest.raises(SampleBufferError, match="read-only"):
                write()
    with SampleBuffer.open_reader(path) as reader:
        assert reader.stats().samples == 1
    with pytest.raises(SampleBufferError, match="no such file"):
        SampleBuffer.open_reader(tmp_path / "missing.sqlite")
    with pytest.raises(ValueError, match="memory"):
        SampleBuffer.open_reader(":memory:")


def test_a_second_writer_is_refused_by_name(tmp_path):
    path = tmp_path / "buffer.sqlite"
    with SampleBuffer(path) as buffer:
        with pytest.raises(SampleBufferError, match=rf"process {os.getpid()} on .* is already writing.*open_reader"):
            SampleBuffer(path)
        buffer.add([make_sample(1)])
    with SampleBuffer(path) as buffer:
        assert buffer.stats().samples == 1


def test_a_writer_in_another_process_is_named(tmp_path):
    path = tmp_path / "buffer.sqlite"
    code = (
        "import sys, r3.buffer as b; buffer = b.SampleBuffer(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(SampleBufferError, match=f"process {holder.pid} on .* is already writing"):
            SampleBuffer(path)
        holder.kill()
    SampleBuffer(path).close()  # the lock died with its holder


def test_a_forked_child_neither_uses_the_buffer_nor_keeps_its_lock(tmp_path):
    """The parent is killed while its child lives on: the next writer must not wait for the child."""
    path = tmp_path / "buffer.sqlite"
    code = """
import os, sys
from r3.buffer import SampleBuffer, SampleBufferError
buffer = SampleBuffer(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        buffer.stats()
    except SampleBufferError as error:
        os.write(1, f"{error}\\n".encode())
    buffer.close()
    sys.stdin.read()
    os._exit(0)
os.write(1, f"child {child}\\n".encode())
os.waitpid(child, 0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = sorted([parent.stdout.readline(), parent.stdout.readline()], key=lambda line: line.startswith("child"))
        assert f"used in its fork {lines[1].split()[1]}" in lines[0]
        with pytest.raises(SampleBufferError, match=f"process {parent.pid}"):
            SampleBuffer(path)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        with SampleBuffer(path) as buffer:
            assert buffer.add([make_sample(1)]) == [1]


def test_a_buffer_dropped_without_closing_lets_go_of_its_lock(tmp_path):
    path = tmp_path / "buffer.sqlite"
    code = """
import sys
from r3.buffer import SampleBuffer
buffer = SampleBuffer(sys.argv[1])
del buffer
SampleBuffer(sys.argv[1]).close()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_threads_take_turns(buffer):
    def add(thread):
        for seed in range(10):
            buffer.add([make_sample(seed, f"q{thread}"), make_sample(seed, f"q{thread}")])

    threads = [threading.Thread(target=add, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffer.stats().samples == 80
    assert buffer.check() == []


def test_a_closed_buffer_says_so(buffer):
    buffer.close()
    buffer.close()
    with pytest.raises(SampleBufferError, match="already closed"):
        buffer.stats()


def test_importing_the_buffer_is_cheap():
    code = "import sys, r3.buffer; print([name for name in ('torch', 'pydantic', 'pyarrow') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def _answers(query: str, step: int, outcomes: str, *, reflection: bool = False) -> list[Sample]:
    context = Context("reflection", 1) if reflection else PLAIN
    return [
        make_sample(place, query, outcome=mark == "+", reward=float(mark == "+"), step=step, context=context)
        for place, mark in enumerate(outcomes)
    ]


def test_recent_attempts_are_those_of_the_last_whole_steps_of_each_query() -> None:
    with SampleBuffer(":memory:") as buffer:
        buffer.add(_answers("a", 1, "++++"))
        buffer.add([*_answers("a", 2, "----"), *_answers("b", 2, "+-")])
        buffer.add([*_answers("a", 4, "+---"), *_answers("a", 4, "++++", reflection=True)])
        assert buffer.attempts(["a", "b"]) == {"a": (12, 5), "b": (2, 1)}
        assert buffer.attempts(["a", "b"], newest=4) == {"a": (4, 1), "b": (2, 1)}
        assert buffer.attempts(["a"], newest=5) == {"a": (8, 1)}  # a step is not split
        assert buffer.attempts(["a"], newest=8, context=None) == {"a": (8, 5)}
        assert buffer.success_rate(["a"], newest=8) == {"a": 0.125}


def test_reflection_is_set_against_plain_answers_to_the_same_queries_in_the_same_steps() -> None:
    with SampleBuffer(":memory:") as buffer:
        assert buffer.reflected(100) == ((0, 0), (0, 0))
        buffer.add([*_answers("a", 1, "+---"), *_answers("b", 1, "++++"), *_answers("a", 1, "++--", reflection=True)])
        buffer.add([*_answers("c", 2, "----"), *_answers("a", 2, "++++")])  # nobody reflected
        buffer.add([*_answers("c", 3, "---+"), *_answers("c", 3, "+-", reflection=True)])
        assert buffer.reflected(100) == ((6, 3), (8, 2))
        assert buffer.reflected(2) == ((2, 1), (4, 1))
        buffer.forget_after(2)
        assert buffer.reflected(100) == ((4, 2), (4, 1))


def test_ledger_overview_and_find_against_plain_counting():
    with SampleBuffer(":memory:", per_query=3, total=None) as buffer:

        def add(outcome: bool, query: str, step: int, context: Context = PLAIN) -> None:
            buffer.add([make_sample(step, query, outcome=outcome, step=step, context=context)])

        for step in (1, 2, 3):
            add(step == 2, "easy", step)
            add(step == 2, "easy", step)
            add(False, "hard", step)
        shown = Context("reflection", 3)
        add(True, "hard", 3, shown)
        assert buffer.ledger("easy") == [(1, "plain", 2, 0), (2, "plain", 2, 2), (3, "plain", 2, 0)]
        assert buffer.ledger("hard")[-1] == (3, "reflection", 1, 1)
        assert buffer.ledger("nobody") == []
        overview = buffer.overview(hardest=1)
        assert [rate.query_id for rate in overview.hardest] == ["hard"]
        assert overview.hardest[0][1:] == (3, 0, 3)
        assert overview.never_solved == 1
        assert [at.step for at in overview.over_time] == [1, 2, 3]
        last, stats = overview.over_time[-1], buffer.stats()
        assert (last.right, last.wrong, last.evicted) == (stats.right, stats.wrong, stats.evicted)
        assert sum(row.right + row.wrong for row in overview.by_age) == stats.samples
        samples = buffer.find([1, 10, 99])
        assert sorted(samples) == [1, 10]  # 1 was evicted, 99 never was
        assert samples[10].context == shown
