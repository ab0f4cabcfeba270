"""How the groups are sampled."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from r3.settings import Settings


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
