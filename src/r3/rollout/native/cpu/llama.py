"""A decoding step of Llama, Qwen2 and Qwen3 written out: seven products per layer and three loops between them.

The modules' own forward takes some thirty-five operations per layer, most of which only move memory, and a lot of
Python. The engine's check against the model's own forward covers this one too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from r3.policy.layers import available, linear
from r3.rollout.native.cache import PagedCache
from r3.rollout.native.cpu.ops import CpuOps
from r3.rollout.native.ops import How, Lanes, New

KNOWN = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on how long the longest row is."""


def knows(model: PreTrainedModel) -> bool:
    """Whether `LlamaStep` computes what this model does: its own classes, no adapters, nothing hooked in."""
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model) not in KNOWN or config.hidden_act not in ("silu", "swish") or rotary not in ROTARY:
        return False
    modules = [*model.model.layers.modules(), model.model.norm, model.lm_head]
    own = all(type(module).__module__ == type(model).__module__ for module in modules if not _common(module))
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return own and not hooked and available()


def _common(module: nn.Module) -> bool:
    """torch's own linear layer, or a container or activation, which are transformers'."""
    return type(module) in (nn.Linear, nn.ModuleList) or not list(module.parameters())


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The modules of a layer; their parameters are looked up at each step, since an update may put others there."""

    norm: Any
    attention: Any
    mlp_norm: Any
    mlp: Any


class LlamaStep:
    """One step of the model over a paged cache: the logits that follow each lane's newest token."""

    def __init__(self, model: PreTrainedModel, ops: CpuOps) -> None:
        self._model, self._ops = model, ops
        self._layers = [
            _Layer(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
            for layer in model.model.layers
        ]

    def __call__(self, lanes: Lanes, cache: PagedCache) -> Tensor:
        decoder, ops = self._model.model, self._ops
        x = torch.nn.functional.embedding(lanes.token, decoder.embed_tokens.weight)
        cosine, sine = decoder.rotary_emb(x, lanes.position[None])
        rotary = cosine[0].contiguous(), sine[0].contiguous()
        added: Tensor | None = None
        for number, layer in enumerate(self._layers):
            normed = self._norm(layer.norm, x, added)
            attended = self._attend(layer.attention, normed, number, cache, lanes, rotary)
            normed = self._norm(layer.mlp_norm, x, linear(layer.attention.o_proj, attended))
            gated = ops.gate_mlp(linear(layer.mlp.gate_proj, normed), linear(layer.mlp.up_proj, normed))
            added = linear(layer.mlp.down_proj, gated)
        return linear(self._model.lm_head, self._norm(decoder.norm, x, added))

    def _norm(self, norm: Any, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self._ops.normalise(x, norm.weight, norm.variance_epsilon, added)

    def _attend(
        self, attention: Any, x: Tensor, number: int, cache: PagedCache, lanes: Lanes, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        n, size = len(x), attention.head_dim
        query, key, value = (
            linear(layer, x).view(n, -1, size) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if (norm := getattr(attention, "q_norm", None)) is not None:
            query, key = self._norm(norm, query), self._norm(attention.k_norm, key)
        how = How(attention.scaling, getattr(attention, "sliding_window", None))
        return self._ops.attend_rotated(New(query, key, value), number, cache, lanes, how, rotary).view(n, -1)
