"""The policy as an engine sees it (tokens and a cache in, logits of the next token out), and what all engines share.

A key-value cache whose rows come and go: stock transformers modelling code reads it like any other cache.

transformers' own `DynamicCache` copies every key and value at every token (it grows by concatenation), and its
sliding-window layers forget where a row began. Here each layer has a little room to write the next tokens in, and keeps
every key: a model with sliding windows masks what it must not see, as it does in training.

Rows are aligned to the right: every row's newest key lies in the last column, so that one column per step serves all
rows; what lies left of a row's first key is padding, which the attention mask hides.

torch's attention for decoding, under the name `r3_grouped`: keys and values are read where they lie in the cache.

transformers repeats the keys and values of grouped-query attention to as many heads as there are queries before it
calls torch whenever there is a mask: at each token a copy of the whole cache, and the attention then reads that
(SmolLM2, 64 rows of 96 tokens: 2.9 ms per layer, 0.5 without the copy). With one new token per row, the queries that
share a head of keys can instead be the rows of one small attention.
"""

from __future__ import annotations

import abc
import inspect
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from r3.policy.layers import logits_of, onednn
from r3.rollout import Request, Response, Sampling
from r3.samples import IntArray

# All kernels of torch's attention but cuDNN's: that one compiles a plan for each new length, and in decoding every step
# has a new length (measured on an H200, 1.8B parameters, 256 rows: 92 ms per step with it, 52 ms without).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalLM:
    """A Hugging Face causal language model, called as decoding needs it. Its weights are read in place."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._accepts = inspect.signature(model.forward).parameters.keys()
        layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
        foreign = sorted(kind.__name__ for kind in layers - {DynamicLayer, DynamicSlidingWindowLayer})
        if foreign or "past_key_values" not in self._accepts:
            reason = f"cache layers of type {', '.join(foreign)}" if foreign else "its forward takes no past_key_values"
            raise ValueError(
                f"{type(model).__name__} remembers more than the keys and values of attention ({reason}), and that "
                "cannot move from batch to batch; use a model with attention layers only, or another rollout engine"
            )

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def _embedding(self) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def vocabulary(self) -> int:
        return len(self._embedding)

    @property
    def _positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def last_position(self) -> int:
        """The last position the model has, as far as its config says."""
        return (self._positions or 2**31) - 1

    def check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Refuse what the model cannot answer, before anything is generated."""
        positions, vocabulary = self._positions, self.vocabulary
        for number, request in enumerate(requests):
            length = len(request.prompt)
            if length == 0:
                raise ValueError(f"request {number} has an empty prompt; give it at least a start token")
            if request.n < 1:
                raise ValueError(f"request {number} asks for {request.n} responses; ask for at least 1, or drop it")
            if request.seed < 0:
                raise ValueError(f"request {number} has seed {request.seed}; use a seed of at least 0")
            if request.prompt.min() < 0 or request.prompt.max() >= vocabulary:
                raise ValueError(
                    f"request {number} has token ids outside the model's 0…{vocabulary - 1}; "
                    "encode it with the tokenizer of this model"
                )
            longest = max(request.max_tokens(index, sampling) for index in range(request.n))
            if positions is not None and length + longest > positions:
                raise ValueError(
                    f"request {number}: a prompt of {length} tokens and max_tokens = {longest} exceed the "
                    f"model's {positions} positions (max_position_embeddings); shorten the prompt, or set max_tokens "
                    f"to at most {max(0, positions - length)}"
                )

    def logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Logits that follow the last of each row's new tokens; their keys and values join the cache. [rows, vocab]

        `tokens` and `positions` are [rows, new tokens]; `mask` is [rows, columns of the cache and new tokens].
        """
        options = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._accepts}
        with sdpa_kernel(_KERNELS):
            output = self.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, [tokens, vocab], as the model's own forward makes them."""
        return logits_of(self.model, hidden)

    def own_logprobs(self, tokens: IntArray) -> Tensor:
        """Log-probs of what follows these tokens, by the model's own forward and attention. [vocab]"""
        ids = torch.from_numpy(tokens.astype("int64")).to(self.device)
        with self.evaluating():
            logits: Tensor = self.model(input_ids=ids.unsqueeze(0)).logits[0, -1]
        return logits.float().log_softmax(-1)

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Another attention while the block runs. The config is what a forward looks at; that is all that is set."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = before

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Attention and products as suits a row of one new token, where the model takes them."""
        name = self.model.config._attn_implementation
        with self.attention(GROUPED if name == "sdpa" else name), onednn(self.model):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout and the like off; afterwards every module is as it was."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def diverged() -> FloatingPointError:
    """What an engine raises where the policy gives it no distribution to draw from."""
    return FloatingPointError(
        "the policy's logits hold NaN or infinite values; go back to a checkpoint before it diverged, "
        "or run it in a dtype with more range (bfloat16, float32)"
    )


class SingleRun(abc.ABC):
    """An engine over a policy: one `generate` at a time, checked before it starts, ended by the next call."""

    def __init__(self, policy: CausalLM) -> None:
        self._policy = policy
        # Weak, so that a caller who drops the responses half-way ends the work and frees its memory at once.
        self._running: weakref.ref[Generator[Response, None, None]] | None = None
        self._cancelled = threading.Event()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        """Yield every request's n responses as they finish; an earlier call that was left unfinished is ended."""
        self._end_running()
        self._policy.check(requests, sampling)
        responses = self._responses(requests, sampling)
        self._running = weakref.ref(responses)
        return responses

    def cancel(self) -> None:
        """Have the `generate` that another thread is in raise `Cancelled`; only engines with a `hold` look."""
        self._cancelled.set()

    @abc.abstractmethod
    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        """The responses; closing the generator gives up what it holds."""

    def _end_running(self) -> None:
        responses = self._running() if self._running is not None else None
        if responses is not None:
            responses.close()


# ------------------------------------------------------------------- the cache


# Columns of room. A full cache is copied into a bigger one every ROOM tokens, beside ROOM reads of it by attention.
ROOM = 64


class RowsOf(NamedTuple):
    """Some rows of a cache, a row possibly several times."""

    cache: Cache
    rows: Sequence[int]


class GrowingLayer(DynamicLayer):
    """One layer's keys and values: `keys` and `values` are the filled part of tensors with room for more columns."""

    # Read by transformers where it builds masks: it then need not look whether a decoding step's mask hides anything,
    # a look that would make the host wait for the device at every step.
    is_compileable = True

    _stores: tuple[Tensor, Tensor] | None = None

    @classmethod
    def holding(cls, key_store: Tensor, value_store: Tensor, columns: int) -> GrowingLayer:
        """A layer over tensors of shape [rows, heads, columns + room, head size]."""
        layer = cls()
        layer.dtype, layer.device = key_store.dtype, key_store.device
        layer._stores = key_store, value_store
        layer.keys, layer.values = key_store[:, :, :columns], value_store[:, :, :columns]
        layer.is_initialized = True
        return layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new columns; all that are there now."""
        if self.keys is None or self.values is None:  # a prefill: it gets room when its rows join a batch
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        key_store, value_store = self._stores or (self.keys, self.values)
        key_store, self.keys = _append(key_store, self.keys, key_states)
        value_store, self.values = _append(value_store, self.values, value_states)
        self._stores = key_store, value_store
        return self.keys, self.values


def _append(store: Tensor, filled: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    start, end = filled.shape[2], filled.shape[2] + new.shape[2]
    if end > store.shape[2]:
        store = _store_like(filled, filled.shape[0], end + ROOM)
        store[:, :, :start] = filled
    store[:, :, start:end] = new
    return store, store[:, :, :end]


def _store_like(part: Tensor, rows: int, columns: int) -> Tensor:
    # Zeros, not garbage: a masked column is weighted with 0, and 0 times a stray NaN would still be NaN.
    return part.new_zeros(rows, part.shape[1], columns, part.shape[3])


def new_cache() -> Cache:
    """An empty cache; the model adds its layers as it first runs."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def regroup(cache: Cache, pieces: Sequence[RowsOf], columns: int) -> None:
    """Make `cache` hold the rows of all pieces, in order: their last `columns` columns, padded on the left if shorter.

    `cache` may be among the pieces. It changes layer by layer, so that no more than one layer is ever held twice.
    """
    chosen = [torch.tensor(piece.rows, device=_states(piece.cache, 0)[0].device) for piece in pieces]
    for i in range(len(pieces[0].cache)):
        keys, values = zip(*(_states(piece.cache, i) for piece in pieces), strict=True)
        layer = GrowingLayer.holding(_join(keys, chosen, columns), _join(values, chosen, columns), columns)
        cache.layers[i : i + 1] = [layer]


def _states(cache: Cache, i: int) -> tuple[Tensor, Tensor]:
    layer = cache.layers[i]
    assert isinstance(layer, GrowingLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _join(parts: Sequence[Tensor], chosen: Sequence[Tensor], columns: int) -> Tensor:
    """The chosen rows of all parts below each other, their right edges at column `columns`, room beyond it."""
    store = _store_like(parts[0], sum(map(len, chosen)), columns + ROOM)
    top = 0
    for part, rows in zip(parts, chosen, strict=True):
        width = min(columns, part.shape[2])
        newest = part[:, :, part.shape[2] - width :]
        store[top : top + len(rows), :, columns - width : columns] = newest[rows.to(part.device)]
        top += len(rows)
    return store


# ---------------------------------------------------- attention while decoding


GROUPED = "r3_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [rows, heads, tokens, D] → output [rows, tokens, heads, D]."""
    rows, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    if tokens > 1 or groups == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    query = query.reshape(rows, key.shape[1], groups, size)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, size), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
