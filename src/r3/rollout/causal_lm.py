"""The policy as an engine sees it (tokens and a cache in, logits of the next token out), and what all engines share."""

from __future__ import annotations

import abc
import inspect
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from r3.policy.head import logits_of
from r3.policy.linear import onednn
from r3.rollout.grouped import GROUPED
from r3.rollout.protocol import Request, Response, Sampling
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
