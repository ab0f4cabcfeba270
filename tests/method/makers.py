"""Small samples and groups for the method's tests, and hypothesis strategies over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from r3.samples import PLAIN, Context, Group, Query, Sample

REFLECTION = Context("reflection", 1)


def make_sample(
    outcome: bool | None = False,
    *,
    query_id: str = "q",
    tokens: Sequence[int] = (1, 2, 3),
    entropies: Sequence[float] | None = None,
    reward: float | None = None,
    **more: Any,
) -> Sample:
    """A sample whose reward is its outcome unless said otherwise."""
    n = len(tokens)
    return Sample(
        query_id,
        np.asarray(tokens, dtype=np.int32),
        np.full(n, -0.5, dtype=np.float32),
        entropies=np.asarray(entropies if entropies is not None else [0.5] * n, dtype=np.float32),
        outcome=outcome,
        reward=float(bool(outcome)) if reward is None else reward,
        **more,
    )


def make_group(samples: Sequence[Sample], *, context: Context = PLAIN, query_id: str = "q", **more: Any) -> Group:
    """A group of those samples under a short prompt."""
    return Group(Query(query_id, "1+1="), tuple(samples), np.array([7, 8, 9]), context=context, **more)


@st.composite
def samples_of(draw: st.DrawFn, query_id: str = "q", outcome: bool | None = None, context: Context = PLAIN) -> Sample:
    """A random sample of one query: right, wrong, truncated, of any age."""
    right = draw(st.booleans()) if outcome is None else outcome
    truncated = False if right else draw(st.booleans())
    n = draw(st.integers(1, 12))
    return make_sample(
        right,
        query_id=query_id,
        tokens=draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)),
        entropies=draw(st.lists(st.floats(0, 5, width=32), min_size=n, max_size=n)),
        reward=draw(st.sampled_from([1.0, 1.25, 1.75])) if right else 0.0,
        finish="length" if truncated else "stop",
        policy_version=draw(st.integers(0, 20)),
        context=context,
    )


@st.composite
def groups_of(draw: st.DrawFn, query_id: str = "q") -> Group:
    """A random group: solve-none, solve-all or mixed, plain or reflection."""
    kind = draw(st.sampled_from(["none", "all", "any"]))
    context = draw(st.sampled_from([PLAIN, PLAIN, REFLECTION]))
    outcome = {"none": False, "all": True, "any": None}[kind]
    members = draw(st.lists(samples_of(query_id, outcome, context), min_size=1, max_size=8))
    return make_group(members, query_id=query_id, context=context, plain_prompt=np.array([1, 2]))


QUERIES = ("a", "b", "c")
BATCH = st.tuples(*(groups_of(q) for q in QUERIES))
HISTORY = st.fixed_dictionaries({q: st.lists(samples_of(q), max_size=6) for q in QUERIES})
