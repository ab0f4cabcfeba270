"""The base of all settings, and the sections of the rooms that have few: model, optimiser, rollout, buffer, run and
evaluate. Those of the method and the tasks live in their rooms.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MOST = 2**53
"""No whole number of a setting may be above this: what floats, torch and SQLite all hold exactly."""
_NUMBERS = {str(kind) for kind in (int, float, int | None, float | None)}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, the docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """What pydantic would take for something else, or nothing behind it could use, is refused."""
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and annotation in _NUMBERS:
            raise ValueError("must be a number, not true or false")
        if isinstance(value, str) and not _is_text(value):
            raise ValueError("holds a zero byte or half a character (a lone surrogate)")
        if isinstance(value, int | float) and MOST < abs(value) < math.inf:
            raise ValueError(f"beyond {MOST:,}")
        return value


class Switchable(Settings):
    """A mechanism that can be turned off: `replay: off` means `replay: {enabled: false}`."""

    enabled: bool = True
    """Whether the mechanism acts at all."""

    @model_validator(mode="before")
    @classmethod
    def _accept_on_off(cls, given: Any) -> Any:
        if isinstance(given, bool):
            return {"enabled": given}
        if isinstance(given, str) and given.lower() in ("on", "off"):
            return {"enabled": given.lower() == "on"}
        return given


class BufferSettings(Settings):
    """The sample buffer S."""

    per_query: int | None = Field(64, ge=1)
    """Most living samples of one query; None for no limit."""
    total: int | None = Field(1_000_000, ge=1)
    """Most living samples in all; None for no limit."""
    successes_from: str | None = None
    """Directory of an earlier run of r3 train on the same problems with the same tokenizer: its right answers are
    replayed where this run has too few of its own. It is only read; {seed} in it is this run's seed."""


class RunSettings(Settings):
    """The run directory and what is kept in it."""

    dir: str = "runs/{method}-{task}-{seed}"
    """Where the run is written; {method}, {task} and {seed} are filled in."""
    seed: int = Field(0, ge=0)
    """Seeds everything: data order, sampling, initialisation."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between two checkpoints; one is also written at the end and when the run is stopped."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints are kept."""
    rollouts_every: int = Field(1, ge=0)
    """Save the rollouts of every n-th step; 0 for none."""
    rollouts_groups: int = Field(8, ge=1)
    """How many groups of a saved step keep their texts and per-token numbers; the others keep a summary."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads for torch; None takes one per physical core, within the container's quota."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs r3-rl[wandb])."""
    trackio: bool = False
    """Log to trackio (needs r3-rl[trackio])."""
    project: str = Field("r3", min_length=1)
    """The project at W&B and trackio."""
    name: str | None = Field(None, min_length=1)
    """The run's name at W&B and trackio, by default its directory's name; {method}, {task} and {seed} are filled in."""
    group: str | None = Field(None, min_length=1)
    """The group of runs it belongs to at W&B and trackio, e.g. all seeds of one setting."""
    tags: list[str] = Field(default_factory=list)
    """Tags at W&B; trackio, which has no tags, keeps them in its config."""


class EvaluateSettings(Settings):
    """Held-out accuracy under the plain prompt, during and after training."""

    every: int = Field(0, ge=0)
    """Evaluate every n-th step; 0 only before and after."""
    every_tokens: int = Field(0, ge=0)
    """Evaluate each time this many more tokens have been generated in training; 0 to go by steps alone."""
    samples: int = Field(1, ge=1, le=100_000)
    """Answers to each held-out problem; with several, pass@1 is their mean and pass@k is reported for k = samples."""
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    """Longest held-out answer, e.g. more than in training, where the limit saves time; None: rollout.max_tokens."""
    temperature: float = Field(1.0, ge=0, le=1e3)
    """Sampling temperature of the evaluation; 0 is greedy."""


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


_Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Switchable):
    """Low-rank adapters through peft: train a few million parameters instead of all."""

    enabled: bool = False
    """Train adapters instead of the whole model."""
    rank: int = Field(16, ge=1, le=100_000)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters (divided by the rank)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the adapters; 0 keeps log-probs of rollout and update the same."""
    targets: str | list[str] = "all-linear"
    """Which layers get adapters: peft's target_modules."""

    @model_validator(mode="after")
    def _is_on_if_it_is_set(self) -> LoraSettings:
        given = self.model_fields_set
        if given and "enabled" not in given:
            raise ValueError(
                f"{', '.join(sorted(given))} given, and the whole model would be trained: set model.lora.enabled=true "
                "(or false, to leave them for later)"
            )
        return self

    @field_validator("targets")
    @classmethod
    def _names_something(cls, targets: str | list[str]) -> str | list[str]:
        if not targets:
            raise ValueError("must name at least one layer, or be all-linear")
        return targets


class ModelSettings(Settings):
    """The policy: any Hugging Face causal LM."""

    path: str = "embedded"
    """A local folder, a hub id, or 'embedded' for the small model that ships with r3."""
    revision: str | None = None
    """Hub revision to pin."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model: whoever wrote it can then do on this machine what you can."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on CUDA and float32 on CPU. Optimiser state is always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA card if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = True
    """On a CUDA card, compile the layers for rollout and update (a minute at the first run, then cached on disk)."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    """Low-rank adapters."""


class OptimiserSettings(Settings):
    """How a step's weighted samples become an update of the weights."""

    updates_per_batch: int = Field(1, ge=1, le=100_000)
    """Optimiser updates per batch of rollouts."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_updates: int = Field(0, ge=0)
    """How many updates the linear warm-up of the learning rate takes."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the run."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW's momentum terms."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Token budget of one packed forward and backward; a longer sequence goes alone."""
    shard: bool = False
    """With several processes: split float32 masters, gradients and AdamW's moments over them (FSDP2)."""
    max_bad_updates: int = Field(5, ge=1)
    """Stop after this many updates in a row with NaN or infinite gradients (each is skipped)."""
