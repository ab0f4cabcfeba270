"""Tiny real models with seeded weights, and what an independent reference says of their distributions."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from r3.rollout import Engine, Request, Response, Sampling

VOCABULARY = 29
POSITIONS = 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")


def build(architecture: str) -> PreTrainedModel:
    """A fresh model in training mode, its weights large enough that next tokens are far from equally likely."""
    torch.manual_seed(7)
    model: PreTrainedModel
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16))
    elif architecture == "gemma3":  # windows shorter than prompts, between layers that see all
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        options = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 5, "layer_types": kinds}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **options))
    else:
        heads = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **heads, bos_token_id=None, eos_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 if parameter.ndim > 1 else parameter)
    return model.train()


@cache
def shared(architecture: str) -> PreTrainedModel:
    """The same model for tests that do not change it."""
    return build(architecture)


def requests_of(lengths: tuple[int, ...] = (3, 11, 1, 7, 16), n: int = 4) -> list[Request]:
    """Ragged prompts."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths]
    return [Request(prompt, n, seed=100 + place) for place, prompt in enumerate(prompts)]


def answers(engine: Engine, requests: list[Request], sampling: Sampling) -> dict[tuple[int, int], Response]:
    """All responses by request and index, each there exactly once."""
    responses = {}
    for response in engine.generate(requests, sampling):
        key = (response.request, response.index)
        assert key not in responses
        responses[key] = response
    assert set(responses) == {(place, index) for place, request in enumerate(requests) for index in range(request.n)}
    return responses


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits before each response token, from one forward over prompt and response without a cache."""
    training = model.training
    whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    logits = model.eval()(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    model.train(training)
    return logits.double().numpy()


def reference_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution of one row the slow way: sort tokens by likelihood, keep them one by one, renormalise."""
    scores = np.asarray(logits, np.float64) / (sampling.temperature or 1.0)
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if sampling.temperature == 0:
        return probs
    if sampling.top_k:
        edge = sorted(probs, reverse=True)[: sampling.top_k][-1]
        probs = np.where(probs >= edge, probs, 0)
        probs /= probs.sum()
    mass, edge = 0.0, 0.0
    for edge in sorted(probs, reverse=True):
        mass += edge
        if mass >= sampling.top_p:
            break
    if sampling.top_p < 1:
        probs = np.where(probs >= edge, probs, 0)
        probs /= probs.sum()
    return probs
