"""Which queries are asked again before their turn: the worked examples, and a naive choice on random ones."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from r3.method.revisit import RevisitSettings, Seen, candidates, choose, ready_again
from r3.method.settings import MethodSettings

PROMPT_REPLAY = MethodSettings(name="prompt-replay").revisit
EXGRPO = MethodSettings(name="exgrpo").revisit
SEEN = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(lambda right, ready, reused: Seen(min(right, 8), 8, ready, reused), *[st.integers(0, 30)] * 3),
    max_size=20,
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_prompt_replay_goes_by_the_distance_to_one_half() -> None:
    """The worked example: of .25, .5, .625 and .75 the order is .5, .625, .25, and .75 is out."""
    seen = {str(rate): Seen(round(8 * rate), 8, ready=0) for rate in (0.25, 0.5, 0.625, 0.75)}
    assert choose(seen, 4, PROMPT_REPLAY, step=1, rng=generator()) == ["0.5", "0.625", "0.25"]
    assert choose(seen, 4, PROMPT_REPLAY, step=1, rng=generator(), leave_out={"0.5"}) == ["0.625", "0.25"]
    tied = {"high": Seen(5, 8, 0), "low": Seen(3, 8, 0), "worn": Seen(4, 8, 0, reused=3), "new": Seen(4, 8, 0)}
    assert choose(tied, 9, PROMPT_REPLAY, step=1, rng=generator()) == ["new", "worn", "low", "high"]


@given(seen=SEEN, most=st.integers(0, 9), step=st.integers(0, 30))
def test_prompt_replay_is_the_naive_choice(seen: dict[str, Seen], most: int, step: int) -> None:
    naive = []
    for name in sorted(seen):
        query = seen[name]
        if 0.24 <= query.right / 8 <= 0.70 and query.ready <= step and query.reused < 20:
            naive.append((abs(query.right / 8 - 0.5), query.right, query.reused, name))
    assert choose(seen, most, PROMPT_REPLAY, step=step, rng=generator()) == [row[-1] for row in sorted(naive)[:most]]


@given(seen=SEEN, most=st.integers(0, 9), seed=st.integers(0, 99))
def test_exgrpo_draws_as_many_as_there_are_and_none_twice(seen: dict[str, Seen], most: int, seed: int) -> None:
    chosen = choose(seen, most, EXGRPO, step=40, rng=generator(seed))
    partly = {name for name, query in seen.items() if 0 < query.right < 8}
    assert set(candidates(seen, EXGRPO, step=40)) == partly
    assert len(chosen) == len(set(chosen)) == min(most, len(partly))
    assert set(chosen) <= partly
    assert chosen == choose(dict(reversed(seen.items())), most, EXGRPO, step=40, rng=generator(seed))


def test_exgrpos_buckets_weigh_by_a_gaussian_and_not_by_their_size() -> None:
    sizes = {1: 3, 3: 1, 4: 6, 6: 2}
    seen = {f"{k}-{i}": Seen(k, 8, 0) for k, size in sizes.items() for i in range(size)}
    weights = {k: math.exp(-((k - 4) ** 2) / 2) for k in sizes}
    drawn = Counter(choose(seen, 1, EXGRPO, step=1, rng=generator(seed))[0] for seed in range(6000))
    for k, size in sizes.items():
        expected = weights[k] / sum(weights.values())
        each = [drawn[f"{k}-{i}"] / 6000 for i in range(size)]
        assert sum(each) == pytest.approx(expected, abs=0.02)
        assert each == pytest.approx([expected / size] * size, abs=0.02)


def test_buckets_far_from_the_middle_alone_can_be_drawn() -> None:
    seen = {"a": Seen(1, 4096, 0), "b": Seen(2, 4096, 0)}
    assert sorted(choose(seen, 2, EXGRPO, step=1, rng=generator())) == ["a", "b"]


def test_the_cooldown_is_five_steps_and_a_fifth_more_or_less() -> None:
    ready = Counter(ready_again(10, PROMPT_REPLAY, generator(seed)) - 10 for seed in range(4000))
    assert set(ready) == {5, 6, 7}  # 4, 5 or 6 steps are left out
    assert ready[6] / 4000 == pytest.approx(0.5, abs=0.03)
    assert ready_again(10, EXGRPO, generator()) == 11


def test_rates_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"revisit\.min_rate=0\.7 is above revisit\.max_rate=0\.2"):
        RevisitSettings(min_rate=0.7, max_rate=0.2)
