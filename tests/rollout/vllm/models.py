"""The suite's tiny models, with heads as wide as vLLM's attention on a CPU asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from r3.policy import ModelSettings
from r3.policy.model import Policy
from r3.policy.packing import Trajectory
from r3.rollout import Request, Response
from tests.tokenizing import char_tokenizer


def save_model(folder: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """As tests.train.tiny's: a random Llama with a character tokenizer whose answers end by chance."""
    tokenizer = char_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def policy_of(folder: Path, **settings: object) -> Policy:
    return Policy.load(ModelSettings(path=str(folder), device="cpu", **settings))


def shake(policy: Policy, seed: int, scale: float = 0.05) -> None:
    """Other weights, as an update leaves them: in place."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def questions(lengths: tuple[int, ...] = (3, 11, 1, 7, 40), n: int = 4) -> list[Request]:
    """Ragged prompts."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(5, 90, length).astype(np.int32) for length in lengths]
    return [Request(prompt, n, seed=100 + place) for place, prompt in enumerate(prompts)]


def gap(
    policy: Policy, requests: list[Request], responses: dict[tuple[int, int], Response], temperature: float = 1.0
) -> float:
    """Mean absolute difference between the engine's log-probs and the trainer's own forward."""
    keys = sorted(responses)
    with torch.no_grad():
        own = policy.statistics(
            [Trajectory(requests[place].prompt, responses[place, index].tokens) for place, index in keys],
            temperature=temperature,
        )
    theirs = np.concatenate([responses[key].logprobs for key in keys])
    return float(np.abs(own.logprobs_T.numpy() - theirs).mean())


def tokens_of(responses: dict[tuple[int, int], Response]) -> dict[tuple[int, int], list[int]]:
    return {key: response.tokens.tolist() for key, response in responses.items()}
