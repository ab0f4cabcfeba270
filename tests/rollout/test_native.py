"""The native engine on the CPU, with its C loops and with its reference operations, against the portable engine.

Both draw from the same uniform numbers, so that sampled responses must be the same token for token.

Covers r3.rollout.native.schedule, r3.rollout.native.decoder, r3.rollout.native.forward, r3.rollout.native.engine,
r3.rollout.causal_lm.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from r3.rollout import Request, Sampling
from r3.rollout.causal_lm import CausalLM
from r3.rollout.native import NativeEngine
from r3.rollout.native.cpu import CpuOps
from r3.rollout.native.forward import FusedLinears, side_by_side
from r3.rollout.native.ops import TorchOps
from r3.rollout.native.schedule import Drawn, OutOfPages, PagePool, Schedule
from r3.rollout.transformers import TransformersEngine

from .models import ARCHITECTURES, SHAPE, VOCABULARY, answers, build, requests_of, shared

STOP = (0, 1, 2, 3)
PLAIN = Sampling(24, STOP)
SETTINGS = {
    "plain": PLAIN,
    "both": Sampling(24, STOP, temperature=0.7, top_k=12, top_p=0.9),
    "greedy": Sampling(24, STOP, temperature=0.0),
}
# Lanes, steps per turn, tokens per page, pages (None: as many as are wanted)
MACHINES = {
    "roomy": (20, 5, 64, None),
    "few lanes": (3, 5, 4, None),
    "tight": (20, 3, 4, 14),
    "one page a row": (6, 16, 64, None),
    "a step a turn": (7, 1, 8, 40),
    "as by itself": (20, None, None, None),
}
OPERATIONS = {"loops": CpuOps, "reference": TorchOps}


def native(model: torch.nn.Module, machine: str = "roomy", **options: object) -> NativeEngine:
    rows, steps, page, pages = MACHINES[machine]
    arguments = {"max_rows": rows, "steps": steps, "page": page, "max_pages": pages, **options}
    return NativeEngine(model, **arguments)  # type: ignore[arg-type]


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for key, response in got.items():
        assert response.tokens.tolist() == expected[key].tokens.tolist(), key
        assert response.finish == expected[key].finish
        assert response.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert response.entropies == pytest.approx(expected[key].entropies, abs=1e-4)


@pytest.mark.parametrize("operations", OPERATIONS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_draws_what_the_portable_engine_draws(architecture: str, setting: str, operations: str) -> None:
    model, sampling = shared(architecture), SETTINGS[setting]
    expected = answers(TransformersEngine(model, max_rows=6), requests_of(), sampling)
    assert len({len(response.tokens) for response in expected.values()}) > 1, "the test wants ragged finish times"
    assert_same(answers(native(model, ops=OPERATIONS[operations]()), requests_of(), sampling), expected)


@pytest.mark.parametrize("operations", OPERATIONS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_response_depends_on_neither_lane_nor_neighbours_nor_room(machine: str, operations: str) -> None:
    model, requests = shared("qwen2"), requests_of((3, 11, 1, 7, 16, 5), n=4)
    expected = answers(TransformersEngine(model, max_rows=1), requests, PLAIN)
    engine = native(model, machine, prefill_tokens=20, ops=OPERATIONS[operations]())
    assert_same(answers(engine, requests, PLAIN), expected)
    assert machine == "tight" or engine.preempted == 0, "rows are set back only where pages run out"
    last = len(requests) - 1
    backwards = answers(engine, requests[::-1], PLAIN)
    assert_same({(last - place, index): response for (place, index), response in backwards.items()}, expected)


def test_a_row_set_back_midway_goes_on_where_it_was() -> None:
    """With pages for little more than one row, all others are set back again and again."""
    model, requests = shared("gemma3"), requests_of((9, 9, 9), n=3)
    expected = answers(TransformersEngine(model, max_rows=9), requests, PLAIN)
    engine = native(model, "tight", max_pages=14)
    assert_same(answers(engine, requests, PLAIN), expected)
    assert engine.preempted > 3


def test_a_prompt_is_prefilled_once_and_its_full_pages_are_shared() -> None:
    model, requests = shared("llama"), requests_of((11, 16), n=6)
    prefilled: list[int] = []
    engine = native(model, "few lanes")
    original = engine._decoder._prefill
    engine._decoder._prefill = lambda batch: (prefilled.extend(len(p.tokens) for p in batch), original(batch))[1]  # type: ignore[method-assign]
    answers(engine, requests, PLAIN)
    assert sorted(prefilled) == [10, 15]

    pool = PagePool(100, size=4)
    schedule = Schedule(requests, PLAIN, pool, lanes=12, steps=4, prefill_tokens=100)
    turn = schedule.next_turn()
    full = [row.pages[: (len(row.prompt) - 1) // 4] for row in schedule.running]
    assert all(pages == full[0] for pages in full[:6])
    assert all(pages == full[6] for pages in full[6:])
    own = [page for row in schedule.running for page in row.pages[(len(row.prompt) - 1) // 4 :]]
    assert len(own) == len(set(own)), "what a row will write to is its own"
    assert len(turn.copies) == 12, "10 and 15 tokens leave a page partly filled, which every row gets a copy of"


def test_weights_are_read_in_place() -> None:
    model = build("qwen2")
    engine, second = native(model), native(model)
    before = answers(engine, requests_of(), PLAIN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    changed = answers(TransformersEngine(model, max_rows=6), requests_of(), PLAIN)
    assert any(before[key].tokens.tolist() != changed[key].tokens.tolist() for key in before)
    assert_same(answers(engine, requests_of(), PLAIN), changed)
    assert_same(answers(second, requests_of(), PLAIN), changed)
    model.load_state_dict({name: tensor.clone() for name, tensor in build("qwen2").state_dict().items()})
    assert_same(answers(engine, requests_of(), PLAIN), before)


def test_new_tensors_for_the_weights_are_noticed() -> None:
    """As when a model is moved or its parameters are put into other storage."""
    model = build("llama")
    engine = native(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
    expected = answers(TransformersEngine(model, max_rows=6), requests_of(), PLAIN)
    assert_same(answers(engine, requests_of(), PLAIN), expected)


def test_the_model_is_left_as_it_was() -> None:
    model = build("qwen3")
    plain, attention = set(model.state_dict()), model.config._attn_implementation
    responses = native(model).generate(requests_of(), PLAIN)
    next(responses)
    assert model.training, "also while responses are still to come"
    assert model.config._attn_implementation == attention
    assert torch.is_grad_enabled()
    assert set(model.state_dict()) == plain
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_a_call_left_unfinished_is_ended_by_the_next_and_by_release() -> None:
    model = shared("llama")
    engine = native(model, "few lanes")
    expected = answers(TransformersEngine(model, max_rows=6), requests_of(), PLAIN)
    left = engine.generate(requests_of(), PLAIN)
    next(left)
    assert_same(answers(engine, requests_of(), PLAIN), expected)
    assert list(left) == []
    left = engine.generate(requests_of(), PLAIN)
    next(left)
    engine.release()
    assert list(left) == []
    assert engine._cache.pages == 0
    gc.collect()
    assert_same(answers(engine, requests_of(), PLAIN), expected)


@pytest.mark.parametrize("max_tokens", [1, 5, 6])
def test_limits_hold_at_and_beside_the_end_of_a_turn(max_tokens: int) -> None:
    responses = answers(native(shared("llama")), requests_of((1, 4), n=3), Sampling(max_tokens, ()))
    assert {len(response.tokens) for response in responses.values()} == {max_tokens}
    assert {response.finish for response in responses.values()} == {"length"}


def test_no_requests_no_responses() -> None:
    assert list(native(shared("llama")).generate([], PLAIN)) == []


def test_a_cache_too_small_for_one_response_names_the_way_out() -> None:
    engine = native(shared("llama"), "tight", max_pages=5)
    with pytest.raises(ValueError, match=r"need .* GiB of key-value cache, but only .*rollout\.max_tokens"):
        list(engine.generate(requests_of(), PLAIN))


def test_what_its_attention_does_not_know_is_refused_by_name() -> None:
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
    capped = Gemma2ForCausalLM(Gemma2Config(**shape, sliding_window=5))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM soft-caps its attention"):
        native(capped)
    sinks = GptOssForCausalLM(GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(ValueError, match="GptOssForCausalLM has attention sinks"):
        native(sinks)


@pytest.mark.parametrize(
    ("dtype", "strange", "taken"), [("bfloat16", 4, True), ("bfloat16", 5, False), ("float32", 1, False)]
)
def test_rows_that_rounding_decides_do_not_make_a_model_unknown(
    monkeypatch: pytest.MonkeyPatch, dtype: str, strange: int, taken: bool
) -> None:
    """What follows tokens that a model hardly knows changes by nats with the last bit, in half precision."""
    own, seen = CausalLM.own_logprobs, []

    def unsteady(self: CausalLM, tokens: np.ndarray) -> torch.Tensor:
        seen.append(tokens)
        return own(self, tokens) - (2.0 if len(seen) <= strange else 0.0)

    monkeypatch.setattr(CausalLM, "own_logprobs", unsteady)
    model = build("llama").to(getattr(torch, dtype))
    if taken:
        native(model, ops=TorchOps())
        assert len(seen) == 9
        assert len(np.unique(np.concatenate(seen) // (VOCABULARY // 8))) >= 8  # from all over the vocabulary
    else:
        with pytest.raises(ValueError, match=r"attends in a way .* off by 2"):
            native(model, ops=TorchOps())


def test_fused_layers_share_storage_and_stay_the_same_parameters() -> None:
    model = build("qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    fused = FusedLinears(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == ids
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    attention = model.model.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert len({p.weight.untyped_storage().data_ptr() for p in projections}) == 1
    whole = side_by_side([p.weight for p in projections])
    assert torch.equal(whole, torch.cat([p.weight.data for p in projections]))
    assert whole.data_ptr() == attention.q_proj.weight.data_ptr(), "laid out once, not again"
    x = torch.randn(3, SHAPE["hidden_size"])
    expected = [projection(x) for projection in projections]
    with fused():
        torch.testing.assert_close([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], expected)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_row_finishes_whatever_the_pool(data: st.DataObject) -> None:
    """The bookkeeping alone, with made-up tokens: pages are never written by two, and all come back."""
    page, steps, lanes = (data.draw(st.integers(1, top)) for top in (5, 6, 8))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    n, limit = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    least = -(-(max(lengths) + limit + steps) // page) + 2
    pool = PagePool(data.draw(st.integers(least, least + 30)), page)
    requests = [Request(np.arange(length, dtype=np.int32), n, seed=i) for i, length in enumerate(lengths)]
    schedule = Schedule(requests, Sampling(limit, (0,)), pool, lanes=lanes, steps=steps, prefill_tokens=8)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    done = set()
    for _ in range(2_000):
        if schedule.over:
            break
        schedule.next_turn()
        rows = schedule.running
        assert 0 < len(rows) <= lanes
        assert [row.lane for row in rows] == list(range(len(rows)))
        written: list[int] = []
        for row in rows:
            assert schedule.table[row.lane, : len(row.pages)].tolist() == row.pages
            assert len(row.pages) * page >= row.cached + steps, "room for the whole turn"
            written += row.pages[row.cached // page :]
        assert len(written) == len(set(written))
        shape = (len(rows), steps)
        tokens = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
        for row in schedule.record(Drawn(tokens, np.zeros(shape, np.float32), np.zeros(shape, np.float32))):
            response = row.response().tokens.tolist()
            assert (row.finish == "stop") == (response[-1] == 0)
            assert 0 not in response[:-1]
            assert len(response) <= limit
            done.add((row.request, row.index))
    assert done == {(i, index) for i in range(len(lengths)) for index in range(n)}
    assert pool.free == pool.count - 1


def test_taking_more_pages_than_are_free_takes_none() -> None:
    pool = PagePool(4, size=2)
    with pytest.raises(OutOfPages):
        pool.take(4)
    assert pool.free == 3
