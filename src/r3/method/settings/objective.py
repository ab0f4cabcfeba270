"""The surrogate that is maximised."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from r3.method.presets import OBJECTIVES, ObjectiveName
from r3.method.settings.overlay import from_preset
from r3.settings import Settings


class ShapingSettings(Settings):
    """What joins a group learns by A · x/(x + β) instead of the clipped ratio: rare tokens pull, learnt ones stop."""

    by: Literal["none", "policy", "ratio"] = "none"
    """What x is: the policy's probability of the token (LUFFY; also bounds what came from another prompt), or its ratio
    to the policy that drew it (ExGRPO)."""
    beta: float = Field(0.1, gt=0)
    """β: the x at which half of the pull is gone."""


class ObjectiveSettings(Settings):
    """The surrogate that is maximised. `objective: gspo` (or grpo, dapo, dr_grpo, cispo) picks a preset."""

    name: ObjectiveName = "grpo"
    """The preset that the other fields start from."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per sequence (the geometric mean of its tokens', GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """PPO's pessimistic minimum, or CISPO's clipped, gradient-free weight on the log-prob."""
    normalise: Literal["sequence", "token", "constant"] = "sequence"
    """Mean over sequences of the mean over tokens (GRPO), over all tokens (DAPO), or by a constant (Dr. GRPO)."""
    mean_over: Literal["queries", "groups"] = "queries"
    """What the loss is a mean over: the queries of a batch, so that a reflection group adds to the gradient, or all its
    groups, so that it takes from the others'."""
    constant_length: int | None = Field(None, ge=1)
    """The constant that a sequence's sum is divided by when normalise = constant; None: rollout.max_tokens."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 − this."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this (DAPO: 0.28)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """With a negative advantage the ratio counts at most this (dual-clip PPO); None leaves it unbounded there."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy (k3 estimator); 0 for none."""
    correction: Literal["truncated", "stopped", "naive", "recomputed"] = "truncated"
    """Stale tokens: truncated importance weights (decoupled from the clip); the same capped at 1 and ending where the
    policy has moved past the clip; the naive ratio inside the clip; or none, as if the policy had just drawn them, with
    log-probs computed again (RLEP)."""
    importance_cap: float = Field(2.0, gt=0)
    """Truncation of the importance weights."""
    ratio_gate: float | None = Field(10.0, gt=1)
    """Replayed tokens whose importance ratio is outside [1/gate, gate] teach nothing; None for no gate."""
    shaping: ShapingSettings = Field(default_factory=ShapingSettings)
    """Another objective for replayed tokens, demonstrations and refinements."""

    @property
    def constant(self) -> int:
        """`constant_length`, which must be known by the time that losses are weighed (`Config.settled`)."""
        if self.constant_length is None:
            raise ValueError("normalise=constant needs objective.constant_length, e.g. the limit of generated tokens")
        return self.constant_length

    @model_validator(mode="before")
    @classmethod
    def _startfrom_preset(cls, given: Any) -> Any:
        return from_preset(given, OBJECTIVES, "grpo")
