"""The model being trained: weights, packed forwards, the optimiser, one update; whole or sharded over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from r3.settings import Settings, Switchable

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
