"""What the buffer answers to people who look at it, against plain counting."""

from __future__ import annotations

from r3 import SampleBuffer
from r3.samples import Context
from tests.method.makers import make_sample


def test_ledger_overview_and_find() -> None:
    with SampleBuffer(":memory:", per_query=3, total=None) as buffer:
        for step in (1, 2, 3):
            buffer.add([make_sample(step == 2, query_id="easy", tokens=[step, i], step=step) for i in range(2)])
            buffer.add([make_sample(False, query_id="hard", tokens=[9, step], step=step)])
        shown = Context("reflection", 3)
        buffer.add([make_sample(True, query_id="hard", tokens=[8], step=3, context=shown)])
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
        found = buffer.find([1, 10, 99])
        assert sorted(found) == [1, 10]  # 1 was evicted, 99 never was
        assert found[10].context == shown
