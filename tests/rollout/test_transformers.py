"""The portable engine on real tiny models of five families, against teacher forcing and transformers' `generate`.

Covers r3.rollout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from r3.rollout import Engine, Request, Sampling
from r3.rollout.transformers import TransformersEngine

from .models import (
    ARCHITECTURES,
    POSITIONS,
    SHAPE,
    VOCABULARY,
    answers,
    build,
    reference_distribution,
    requests_of,
    shared,
    teacher_forced,
)

STOP = (0, 1, 2, 3)
SETTINGS = {
    "plain": Sampling(24, STOP),
    "cooler": Sampling(24, STOP, temperature=0.7),
    "top_k": Sampling(24, STOP, temperature=1.3, top_k=5),
    "top_p": Sampling(24, STOP, top_p=0.8),
    "both": Sampling(24, STOP, temperature=0.7, top_k=12, top_p=0.9),
    "greedy": Sampling(24, STOP, temperature=0.0),
}


def engine_of(model: PreTrainedModel, max_rows: int = 6, **options: float) -> Engine:
    return TransformersEngine(model, max_rows=max_rows, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_entropies_are_those_of_teacher_forcing(architecture: str, setting: str) -> None:
    model, sampling, requests = shared(architecture), SETTINGS[setting], requests_of()
    for (place, _), response in answers(engine_of(model), requests, sampling).items():
        logits = teacher_forced(model, requests[place].prompt, response.tokens)
        expected = [reference_distribution(row, sampling) for row in logits]
        assert response.logprobs == pytest.approx(
            [np.log(probs[token]) for probs, token in zip(expected, response.tokens, strict=True)], abs=1e-4
        )
        assert response.entropies == pytest.approx(
            [-sum(p * np.log(p) for p in probs if p > 0) for probs in expected], abs=1e-4
        )


def test_the_models_of_these_tests_are_undecided_but_not_uniform() -> None:
    for architecture in ARCHITECTURES:
        responses = answers(engine_of(shared(architecture)), requests_of(), SETTINGS["plain"]).values()
        entropies = np.concatenate([response.entropies for response in responses])
        assert 0.3 < entropies.mean() < 0.97 * np.log(VOCABULARY), architecture


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_transformers_own_greedy(architecture: str) -> None:
    model, requests = build(architecture).eval(), requests_of(n=1)
    responses = answers(engine_of(model, max_rows=3), requests, Sampling(20, STOP, temperature=0.0))
    for place, request in enumerate(requests):
        prompt = torch.from_numpy(request.prompt.astype(np.int64))[None]
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": list(STOP), "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert responses[place, 0].tokens.tolist() == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("setting", ["plain", "both"])
def test_a_response_does_not_depend_on_its_batch(architecture: str, setting: str) -> None:
    model, requests, sampling = shared(architecture), requests_of(n=3), SETTINGS[setting]
    alone = answers(engine_of(model, max_rows=1), requests, sampling)
    assert len({len(response.tokens) for response in alone.values()}) > 1, "the test wants ragged finish times"
    last = len(requests) - 1
    for max_rows, refill, backwards in ((3, 0.25, True), (7, 0.0, False), (15, 0.5, True), (64, 0.25, False)):
        engine = engine_of(model, max_rows, prefill_tokens=20, refill=refill)
        got = answers(engine, requests[::-1] if backwards else requests, sampling)
        for (place, index), response in got.items():
            expected = alone[last - place if backwards else place, index]
            assert response.tokens.tolist() == expected.tokens.tolist()
            assert response.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert response.entropies == pytest.approx(expected.entropies, abs=1e-4)
            assert response.finish == expected.finish


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100])
def test_a_prompt_is_prefilled_once(max_rows: int) -> None:
    model, requests = build("llama"), requests_of((3, 11, 7, 16), n=6)
    prefilled: list[int] = []

    def watch(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if (tokens := arguments[0]).shape[1] > 1:
            prefilled.extend([tokens.shape[1]] * len(tokens))

    model.get_input_embeddings().register_forward_pre_hook(watch)
    answers(engine_of(model, max_rows, prefill_tokens=1), requests, SETTINGS["plain"])
    assert sorted(prefilled) == [3, 7, 11, 16]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_first_tokens_follow_the_exact_distribution(top_p: float) -> None:
    model, sampling, draws = shared("llama"), Sampling(1, (), top_p=top_p), 4000
    request = Request(np.array([5, 9, 4], np.int32), draws, seed=3)
    tokens = [int(r.tokens[0]) for r in answers(engine_of(model, max_rows=999), [request], sampling).values()]
    expected = reference_distribution(teacher_forced(model, request.prompt, np.array([0]))[0], sampling) * draws
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5  # the usual condition of the chi-square test; the rest is one more class
    observed, wanted = counts[common].tolist(), expected[common].tolist()
    if (rest := expected[~common].sum()) > 0:
        observed, wanted = [*observed, counts[~common].sum()], [*wanted, rest]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations above its mean


def test_later_tokens_are_drawn_afresh() -> None:
    """The stream's t-th number decides the t-th token: responses that agree on a prefix still part ways."""
    requests = [Request(np.array([5, 9, 4], np.int32), 64, seed=3)]
    responses = answers(engine_of(shared("llama"), max_rows=64), requests, Sampling(12, (), top_k=4))
    assert len({response.tokens.tobytes() for response in responses.values()}) == 64


@pytest.mark.parametrize("max_rows", [1, 3, 10, 1000])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_first_stop_token_or_the_limit_ends_a_response(max_rows: int, max_tokens: int) -> None:
    sampling = Sampling(max_tokens, STOP)
    responses = answers(engine_of(shared("qwen2"), max_rows), requests_of(n=9), sampling).values()
    for response in responses:
        stops = np.isin(response.tokens, STOP)
        assert not stops[:-1].any()
        assert response.finish == ("stop" if stops[-1] else "length")
        assert response.finish == "stop" or len(response.tokens) == max_tokens
        assert len(response.logprobs) == len(response.entropies) == len(response.tokens) <= max_tokens
        assert response.tokens.dtype == np.int32
        assert response.logprobs.dtype == response.entropies.dtype == np.float32
    assert {response.finish for response in responses} == {"stop", "length"}


@pytest.mark.parametrize("max_rows", [1, 3, 1000])
def test_each_response_may_have_a_limit_of_its_own(max_rows: int) -> None:
    """The tokens are those of the unlimited response, cut; a limit above the common one changes nothing."""
    limits, sampling = (1, 5, 99, 2, 24), SETTINGS["plain"]
    free = requests_of((3, 11), n=len(limits))
    cut = [replace(request, limits=limits) for request in free]
    whole = answers(engine_of(shared("llama")), free, sampling)
    for (place, index), response in answers(engine_of(shared("llama"), max_rows), cut, sampling).items():
        expected = whole[place, index].tokens[: limits[index]]
        assert response.tokens.tolist() == expected.tolist()
        assert response.finish == ("stop" if expected[-1] in STOP else "length")


def test_limits_let_a_long_prompt_fit() -> None:
    """What counts is what each response may write, not the common limit."""
    request = Request(np.full(60, 5, np.int32), 2, 0, limits=(4, 2))
    lengths = [len(r.tokens) for r in engine_of(shared("gpt2")).generate([request], Sampling(24, ()))]
    assert sorted(lengths) == [2, 4]


@pytest.mark.parametrize("limits", [(), (3,), (3, 0)])
def test_limits_that_do_not_fit_the_request_are_refused(limits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each of the 2 responses at least 1 token"):
        Request(np.array([5], np.int32), 2, 0, limits=limits)


def test_responses_come_as_they_finish() -> None:
    lengths = [len(r.tokens) for r in engine_of(shared("llama"), 20).generate(requests_of(), SETTINGS["plain"])]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


def test_no_requests_no_responses() -> None:
    assert list(engine_of(shared("llama")).generate([], Sampling(4, ()))) == []


def test_a_response_longer_than_the_cache_s_room() -> None:
    """The cache grows while it is in use, up to the model's last position."""
    model, request = shared("gpt2"), Request(np.array([4], np.int32), 2, seed=1)
    sampling = Sampling(POSITIONS - 1, ())
    for response in answers(engine_of(model), [request], sampling).values():
        logits = torch.from_numpy(teacher_forced(model, request.prompt, response.tokens)).log_softmax(-1)
        expected = logits.gather(1, torch.from_numpy(response.tokens.astype(np.int64))[:, None])
        assert response.logprobs == pytest.approx(expected[:, 0].numpy(), abs=1e-4)


@pytest.mark.parametrize("way", ["close", "break", "drop", "next call", "release"])
def test_leaving_early_leaves_all_in_order(way: str) -> None:
    model, requests, sampling = build("llama"), requests_of(), SETTINGS["plain"]
    model.model.layers[1].eval()  # a mixed state comes back as it was
    modes = [module.training for module in model.modules()]
    engine = engine_of(model)
    before = {key: response.tokens.tolist() for key, response in answers(engine, requests, sampling).items()}
    stream = engine.generate(requests, sampling)
    if way == "break":
        for _ in engine.generate(requests, sampling):
            break
    else:
        next(stream)
        assert not any(module.training for module in model.modules())
        assert torch.is_grad_enabled()
    if way == "close":
        stream.close()  # type: ignore[attr-defined]
    elif way == "drop":
        del stream
    elif way == "release":
        engine.release()
        assert list(stream) == []
    if way != "next call":
        assert [module.training for module in model.modules()] == modes
    assert {key: r.tokens.tolist() for key, r in answers(engine, requests, sampling).items()} == before
    assert [module.training for module in model.modules()] == modes


def test_the_caller_may_fail() -> None:
    model = build("llama")
    engine = engine_of(model)

    def consume() -> None:
        for response in engine.generate(requests_of(), SETTINGS["plain"]):
            raise KeyError(response.index)

    with pytest.raises(KeyError):
        consume()
    assert model.training
    answers(engine, requests_of(), SETTINGS["plain"])


def test_dropout_is_off_and_training_mode_comes_back() -> None:
    model = build("gpt2")  # its dropout is 0.1
    first, second = (answers(engine_of(model), requests_of(), SETTINGS["plain"]) for _ in range(2))
    assert all((first[key].logprobs == second[key].logprobs).all() for key in first)
    assert model.training


def test_updates_in_place_are_seen_and_training_still_works() -> None:
    model, request = build("llama"), Request(np.array([4, 8], np.int32), 1, seed=0)
    engine, sampling = engine_of(model), Sampling(1, (), temperature=0.0)
    favourites = []
    for wanted in (7, 11):
        loss = -model(input_ids=torch.tensor([[4, 8]])).logits[0, -1].log_softmax(-1)[wanted]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 5 * gradient / max(1e-9, float(gradient.norm()))
        favourites.append(int(next(iter(engine.generate([request], sampling))).tokens[0]))
    assert favourites == [7, 11]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_give_finite_float32(dtype: torch.dtype) -> None:
    model = build("qwen3").to(dtype)
    for response in answers(engine_of(model), requests_of(), SETTINGS["both"]).values():
        assert np.isfinite(response.logprobs).all()
        assert (response.entropies >= 0).all()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.array([], np.int32), 1, 0), "empty prompt; give it"),
        (Request(np.array([5], np.int32), 0, 0), "ask for at least 1"),
        (Request(np.array([5], np.int32), 1, -1), "seed -1; use a seed of at least 0"),
        (Request(np.array([VOCABULARY], np.int32), 1, 0), "tokenizer of this model"),
        (Request(np.full(60, 5, np.int32), 1, 0), "60 tokens and max_tokens = 24 exceed the model's 64 .* at most 4"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused_at_once(request_: Request, message: str) -> None:
    good = requests_of()
    with pytest.raises(ValueError, match=message):
        engine_of(shared("gpt2")).generate([*good, request_], SETTINGS["plain"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_rows": 0}, "max_rows"), ({"prefill_tokens": 0}, "prefill"), ({"refill": 2}, "refill")],
)
def test_bad_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(shared("llama"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "reason"), [("mamba", "no past_key_values|Linear"), ("hybrid", "LinearAttentionLayer")]
)
def test_models_that_remember_otherwise_are_refused(kind: str, reason: str) -> None:
    model: PreTrainedModel
    if kind == "mamba":
        model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, state_size=2))
    else:
        kinds = ["conv", "full_attention"]
        model = Lfm2ForCausalLM(Lfm2Config(**SHAPE | {"num_hidden_layers": 2}, layer_types=kinds))
    with pytest.raises(ValueError, match=f"({reason}).*attention layers only, or another rollout engine"):
        engine_of(model)


def test_a_diverged_policy_is_named() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    engine = engine_of(model)
    with pytest.raises(FloatingPointError, match="checkpoint"):
        list(engine.generate(requests_of(), SETTINGS["plain"]))
    assert model.training
