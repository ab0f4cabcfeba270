"""The draw against a brute-force oracle: sort, add up and renormalise in plain float64 Python."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from r3.rollout import Sampling
from r3.rollout.sampling import draw, log_weights, uniform_stream

from .models import reference_distribution

# Eighths: equal or clearly apart, so that float32 and float64 agree on what ties.
LOGITS = st.lists(st.integers(-96, 96).map(lambda i: i / 8), min_size=1, max_size=12)
UNIFORM = st.floats(0, 1, exclude_max=True)


@st.composite
def samplings(draw_: st.DrawFn) -> Sampling:
    temperature = draw_(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]))
    top_p = draw_(st.one_of(st.just(1.0), st.floats(0.01, 0.99)))
    return Sampling(8, (), temperature=temperature, top_p=top_p, top_k=draw_(st.integers(0, 14)))


def on_an_edge(logits: list[float], sampling: Sampling) -> bool:
    """Whether float32 and float64 may disagree about who is kept: a hair from the nucleus' edge."""
    unlimited = Sampling(8, (), temperature=sampling.temperature, top_k=sampling.top_k)
    reached = np.cumsum(sorted(reference_distribution(np.array(logits), unlimited), reverse=True))
    return bool((np.abs(reached - sampling.top_p) < 1e-5).any()) and sampling.top_p < 1


@given(LOGITS, UNIFORM, samplings())
def test_draw_agrees_with_the_oracle(logits: list[float], uniform: float, sampling: Sampling) -> None:
    assume(not on_an_edge(logits, sampling))
    expected = reference_distribution(np.array(logits), sampling)
    got = log_weights(torch.tensor([logits]), sampling)[0].softmax(-1).numpy()
    assert got == pytest.approx(expected, abs=1e-5)
    assert ((got == 0) == (expected == 0)).all()

    drawn = draw(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), sampling)
    token = int(drawn.tokens[0])
    assert expected[token] > 0
    if sampling.temperature == 0:
        assert logits[token] == max(logits)
    else:  # the token's stretch of the distribution function holds the uniform number
        below = math.fsum(expected[:token])
        assert below - 1e-5 <= uniform <= below + expected[token] + 1e-5
    assert float(drawn.logprobs[0]) == pytest.approx(math.log(expected[token]), abs=1e-4)
    assert float(drawn.entropies[0]) == pytest.approx(-sum(p * math.log(p) for p in expected if p > 0), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 1000), UNIFORM), min_size=1, max_size=6), samplings())
def test_rows_do_not_see_each_other(rows: list[tuple[int, float]], sampling: Sampling) -> None:
    logits = torch.stack([torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 3 for seed, _ in rows])
    uniforms = torch.tensor([uniform for _, uniform in rows], dtype=torch.float64)
    together = draw(logits, uniforms, sampling)
    for row in range(len(rows)):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1], sampling)
        for one, many in zip(alone, together, strict=True):
            assert float(one[0]) == pytest.approx(float(many[row]), abs=1e-6)


@given(st.integers(0, 10_000), samplings())
def test_renumbering_tokens_renumbers_the_distribution(seed: int, sampling: Sampling) -> None:
    """Also with ties, which half-precision logits are full of."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (1, 30), generator=generator).float()
    order = torch.randperm(30, generator=generator)
    straight, renumbered = (log_weights(x, sampling).softmax(-1) for x in (logits, logits[:, order]))
    assert torch.allclose(straight[:, order], renumbered, atol=1e-6)


@given(LOGITS, samplings(), st.sampled_from([0.0, 2**-53, 1 - 2**-53]))
def test_the_ends_of_the_unit_interval_draw_possible_tokens(
    logits: list[float], sampling: Sampling, uniform: float
) -> None:
    drawn = draw(torch.tensor([logits + [-math.inf] * 2]), torch.tensor([uniform], dtype=torch.float64), sampling)
    assert 0 <= int(drawn.tokens[0]) < len(logits)
    assert math.isfinite(float(drawn.logprobs[0]))
    assert float(drawn.entropies[0]) >= 0


def test_a_big_vocabulary_keeps_its_tail() -> None:
    """Equal steps over 200,000 equally likely tokens: a float32 distribution function would miss many of them."""
    vocabulary = 200_000
    targets = torch.arange(0, vocabulary, 997)
    uniforms = (targets.double() + 0.5) / vocabulary
    logits = torch.zeros(1, vocabulary).expand(len(targets), -1)
    assert draw(logits, uniforms, Sampling(1, ())).tokens.tolist() == targets.tolist()


@pytest.mark.parametrize("vocabulary", [3, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_show_in_the_numbers_not_as_a_wild_token(temperature: float, vocabulary: int) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[0, 1] = math.nan
    drawn = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), Sampling(1, (), temperature=temperature))
    assert drawn.logprobs.isnan().tolist() == drawn.entropies.isnan().tolist() == [True, False]
    assert (drawn.tokens < vocabulary).all()


def test_streams_are_repeatable_distinct_and_long() -> None:
    def first(seed: int, index: int) -> list[float]:
        return list(itertools.islice(uniform_stream(seed, index), 200))

    assert first(3, 1) == first(3, 1) == np.random.default_rng([3, 1]).random(200).tolist()
    assert len({tuple(first(seed, index)) for seed in range(4) for index in range(4)}) == 16


@st.composite
def large_rows(draw_: st.DrawFn) -> torch.Tensor:
    """A row over a vocabulary of several blocks and a bit: noise of any width, tokens that are out, a few that lead."""
    vocabulary = draw_(st.integers(1, 1500))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 999)))
    logits = torch.randn(vocabulary, generator=generator) * draw_(st.sampled_from([0.0, 1.0, 8.0, 1000.0]))
    logits += draw_(st.sampled_from([0.0, 1e4, -1e38]))
    out = torch.rand(vocabulary, generator=generator) < draw_(st.sampled_from([0.0, 0.5, 0.99]))
    out[draw_(st.integers(0, vocabulary - 1))] = False
    return logits.masked_fill(out, -math.inf)


@given(large_rows(), st.one_of(UNIFORM, st.sampled_from([0.0, 1 - 2**-53])), st.sampled_from([0.7, 1.0]))
def test_the_draw_by_blocks_is_the_plain_inversion(logits: torch.Tensor, uniform: float, temperature: float) -> None:
    """Against one distribution function over the whole vocabulary, in float64."""
    drawn = draw(logits[None], torch.tensor([uniform], dtype=torch.float64), Sampling(1, (), temperature=temperature))
    token = int(drawn.tokens[0])
    scores = (logits / temperature).double()
    probs = scores.softmax(0)
    assert probs[token] > 0
    below = float(probs[:token].sum())
    assert below - 1e-5 <= uniform <= below + float(probs[token]) + 1e-5
    assert float(drawn.logprobs[0]) == pytest.approx(math.log(probs[token]), abs=1e-4)
    entropy = -float((probs * probs.log()).nan_to_num(0).sum())
    assert float(drawn.entropies[0]) == pytest.approx(entropy, abs=1e-4)


def test_many_rows_are_drawn_like_each_alone() -> None:
    """More logits than are looked at together on a CPU."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 50_000, generator=generator) * 3
    uniforms = torch.rand(40, dtype=torch.float64, generator=generator)
    together = draw(logits, uniforms, Sampling(1, ()))
    for row in range(0, 40, 7):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1], Sampling(1, ()))
        assert int(alone.tokens[0]) == int(together.tokens[row])
        assert float(alone.entropies[0]) == pytest.approx(float(together.entropies[row]), abs=1e-5)
