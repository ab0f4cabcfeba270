"""Rollout: prompts in, responses with their log-probs and entropies out. One protocol, several engines.

Every engine implements `generate(requests, sampling)`, which yields responses as they finish. It owes its caller:
- `n` responses to every request, each exactly once, in any order, each as soon as it is finished, so that verifying
  overlaps with generating.
- Log-probs of the very distribution the tokens were drawn from (after temperature, top-k and top-p), and its entropies,
  from the same forward pass; an engine that cannot give entropies leaves them out.
- A response depends on its prompt, its seed and the policy, not on what else was in the batch or when it ran
  (up to the floating-point noise of the kernels).
- It knows nothing of rewards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, runtime_checkable

from pydantic import Field, model_validator

from r3.samples import FinishReason, FloatArray, IntArray
from r3.settings import Settings

__all__ = ["Cancelled", "Engine", "EngineBeside", "Request", "Response", "RolloutSettings", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens, and when to stop."""

    max_tokens: int
    """Longest response, the stop token included; one that reaches it without stopping is truncated."""
    stop_tokens: tuple[int, ...]
    """Ids that end a response; the one that did is its last token."""
    temperature: float = 1.0
    """0 means greedy: the likeliest token, with log-prob and entropy of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0: no limit), not {self.top_k}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer `n` times."""

    prompt: IntArray
    n: int
    seed: int
    """Seeds the request's responses, each from (seed, index): the same seed and policy give the same responses."""
    limits: tuple[int, ...] | None = None
    """A length limit for each response, in place of a higher `Sampling.max_tokens`: a budget per sample, or the same
    work for several engines. None leaves the limit to `Sampling`."""

    def __post_init__(self) -> None:
        if self.limits is not None and (len(self.limits) != self.n or min(self.limits, default=0) < 1):
            raise ValueError(f"limits must give each of the {self.n} responses at least 1 token, not {self.limits}")

    def max_tokens(self, index: int, sampling: Sampling) -> int:
        """Longest that response `index` may be."""
        return sampling.max_tokens if self.limits is None else min(self.limits[index], sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class Response:
    """One finished answer: the `index`-th of the n to request number `request`."""

    request: int
    index: int
    tokens: IntArray
    logprobs: FloatArray
    entropies: FloatArray | None
    finish: FinishReason


class Engine(Protocol):
    """A rollout engine over the policy being trained."""

    exact: bool
    """Whether log-probs are those of the policy's own forward, up to the noise of its kernels. If not, the update
    corrects the difference with truncated importance weights."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Response]:
        """Yield every request's n responses as they finish."""
        ...

    def release(self) -> None:
        """Give memory back for the update; the next `generate` takes it again."""
        ...


class Cancelled(Exception):
    """What `generate` raises when another thread cancelled it."""


@runtime_checkable
class EngineBeside(Engine, Protocol):
    """An engine that can generate, on another thread, while the policy is trained."""

    def hold(self) -> None:
        """Until `release`, draw from a copy of the weights as they are now, whatever becomes of the policy's."""
        ...

    def cancel(self) -> None:
        """End what has been generated since `hold` on another thread: it raises `Cancelled` there, soon."""
        ...


class RolloutSettings(Settings):
    """Sampling the groups."""

    engine: Literal["auto", "native", "transformers", "vllm", "vllm-server"] = "auto"
    """Which engine draws the samples; auto takes native where it runs and knows the model, else transformers."""
    servers: tuple[str, ...] = ()
    """With engine=vllm-server, the addresses of the vLLM servers, e.g. [http://host:8000, http://other:8000]."""
    server_patience: float = Field(600.0, gt=0)
    """Seconds to wait for a vLLM server's response, and for any server to come back when all are gone."""
    ahead: int = Field(0, ge=0, le=1)
    """1: draw the next step's answers while the update runs, from the weights before it (with engine=vllm-server)."""
    group_size: int = Field(8, ge=2, le=100_000)
    """G: samples per prompt. A group of one has nothing to compare with."""
    max_tokens: int = Field(1024, ge=1, le=10_000_000)
    """Longest response; longer ones are cut (truncated)."""
    temperature: float = Field(1.0, ge=1e-3, le=1e3)
    """Sampling temperature; the update uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the distribution drawn from is not the policy's own, and ratios are off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 for all. The same warning applies."""
    max_rows: int = Field(256, ge=1, le=1_000_000)
    """How many responses are generated side by side at most."""
    memory: float = Field(0.85, gt=0, lt=1)
    """Share of the free memory, of the card or the machine, that the engine's key-value cache may take as it runs."""

    @model_validator(mode="after")
    def _servers_where_they_are_used(self) -> Self:
        if self.engine == "vllm-server" and not self.servers:
            raise ValueError("engine=vllm-server needs addresses: set rollout.servers=[http://HOST:PORT, …]")
        if self.servers and self.engine != "vllm-server":
            raise ValueError(
                f"rollout.servers is for engine=vllm-server, not {self.engine}: set one or remove the other"
            )
        for address in self.servers:
            if not re.fullmatch(r"http://([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}/?", address):
                raise ValueError(f"{address!r} is not the address of a server; write http://HOST:PORT")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("rollout.servers names a server twice")
        return self
