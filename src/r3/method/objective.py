"""The surrogate loss over packed tokens: clipped ratios, importance weights for stale tokens, optional KL.

With π the policy being trained, π_prox the policy at the start of the step and π_behave the one that drew the token:

    r_t = π(t) / π_prox(t)                    clipped, so that one step stays near where it started
    w_t = min(π_prox(t) / π_behave(t), C)     no gradient; what the sample's staleness is corrected with
    GRPO, DAPO, Dr. GRPO, GSPO:  ℓ_t = −w_t · max(min(r_t A, clip(r_t, 1−ε_low, 1+ε_high) A), c · min(A, 0))
    CISPO:                       ℓ_t = −w_t · sg[clip(r_t, 1−ε_low, 1+ε_high)] A · log π(t)
    loss = Σ_t weight_t · (ℓ_t + β · KL_t)    KL_t = π_ref/π − log(π_ref/π) − 1

GSPO's r and w are one number a sequence: the geometric mean over its tokens. Denominators are in the weights (`step`).
With shaping, the tokens of what joined a group have ℓ_t = −A · x/(x + β) instead, x being π(t) or π(t)/π_behave(t):
without clip and w. What may join is a replayed sample, a demonstration (π_behave = 1, by convention) or a refinement
(drawn in this step under another prompt); all that is said of replayed tokens below holds for them, but for the gate.

Departures from the paper, and choices it leaves open:
- For fresh samples π_prox = π_behave, so w = 1 and this is the paper's surrogate. For replayed ones the paper's naive
  ratio π/π_behave would be clipped to silence or to noise after hundreds of updates; here the clip is taken around
  π_prox and the staleness goes into the truncated w ("decoupled"). `correction: naive` gives the paper's literal form.
- Where A < 0, PPO's minimum leaves r unbounded above. Fresh tokens never get there; a wrong answer replayed with the
  naive ratio does, where it shares a token with what the policy has learnt since. The dual clip c is for that.
- `correction: stopped` has w = min(π_prox/π_behave, 1), and 0 beyond 1 + ε_high for A > 0 (1 − ε_low for A < 0): the
  truncated weight pulls hardest at what the policy has since learnt, this one stops there.
- `correction: recomputed` has w = 1 for replayed tokens: π_behave := π_prox, as RLEP computes their log-probs again.
- A gate drops replayed tokens that the policy has left far behind: π_prox/π_behave outside [1/gate, gate] gives w = 0,
  whatever the correction.
- A sample drawn under another prompt has no behaviour log-probs for this one: π_behave := π_prox, so w = 1 each time it
  is replayed, and neither correction nor clip nor gate bounds how far its repetition may pull. Shaping by π does, and
  so does `replay.ratio` = first_replayed: π_behave is then the policy that first replayed the sample here. The
  diagnostics count such tokens as `other_context` and leave them out of ratios and effective sample size, where they
  would look perfectly on-policy.
- A is a token's own: methods that compare whole answers give all tokens of one the same.
- With one update a batch π_prox is π itself: no second forward is needed, `proximal_T` may be left out.

Shapes: T tokens, S sequences, packed one after the other without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

import torch
from torch import Tensor

from r3.method.mixed import FROM_ELSEWHERE, JOINING, Origin
from r3.method.settings import ObjectiveSettings

ORIGINS: tuple[str, ...] = get_args(Origin)
REPLAYED = ORIGINS.index("replayed")
_ELSEWHERE = [ORIGINS.index(origin) for origin in FROM_ELSEWHERE]
_JOINING = [ORIGINS.index(origin) for origin in JOINING]
# exp(30) ≈ 1e13: far outside any clip, gate or cap, and finite in float32 even when squared.
LOG_RATIO_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of a micro-batch, and what the method knows of them. Whole sequences only."""

    sequence_T: Tensor
    """Which sequence (0 … S−1) a token belongs to."""
    behaviour_T: Tensor
    """Log-prob of the token under the policy and prompt that drew it."""
    advantage_T: Tensor
    weight_S: Tensor
    """What one token of the sequence weighs in the loss (`WeightedSample.weight`)."""
    origin_S: Tensor
    """Index into ORIGINS."""
    other_context_S: Tensor
    """True where the behaviour log-probs belong to another prompt."""
    proximal_T: Tensor | None = None
    """Log-probs under the policy at the start of the step; None if that is the current policy (one update a batch)."""
    reference_T: Tensor | None = None
    """Log-probs under the reference policy; needed for a KL penalty."""


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Per-token facts of the loss, kept on the device without a sync; `merge` micro-batches, then `summary`."""

    log_ratio_T: Tensor
    """log π/π_behave: how far the policy has moved from the one that drew the token."""
    clipped_T: Tensor
    gated_T: Tensor
    kl_T: Tensor
    origin_T: Tensor
    moved_T: Tensor
    """Drawn under another prompt: the ratio says nothing."""

    @staticmethod
    def merge(parts: Sequence[Diagnostics]) -> Diagnostics:
        """All tokens of several micro-batches."""
        return Diagnostics(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Diagnostics)))

    def cpu(self) -> Diagnostics:
        """The same in the host's memory."""
        return Diagnostics(*(getattr(self, f.name).cpu() for f in fields(Diagnostics)))

    def summary(self) -> dict[str, float]:
        """Clip share, ratio quantiles and effective sample size of each origin present, as plain numbers.

        `ess` is (Σw)² / (n Σw²) of the untruncated ratios: 1 means on-policy, 1/n that one token rules.
        """
        out: dict[str, float] = {}
        if moved := int(self.moved_T.sum()):
            out["tokens/other_context"] = moved
        for index, origin in enumerate(ORIGINS):
            here = (self.origin_T == index) & ~self.moved_T
            n = int(here.sum())
            if n == 0:
                continue
            ratio = self.log_ratio_T[here].double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().sort().values
            out[f"tokens/{origin}"] = n
            out[f"clip_share/{origin}"] = float(self.clipped_T[here].double().mean())
            out[f"gated_share/{origin}"] = float(self.gated_T[here].double().mean())
            out[f"kl/{origin}"] = float(self.kl_T[here].double().mean())
            out[f"ess/{origin}"] = float(ratio.sum().square() / (n * ratio.square().sum()))
            for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                out[f"ratio_{name}/{origin}"] = float(ratio[min(n - 1, math.ceil(q * n) - 1 if q < 1 else n - 1)])
        return out


@dataclass(frozen=True, slots=True)
class Loss:
    """The scalar to backpropagate and what happened on the way to it."""

    loss: Tensor
    diagnostics: Diagnostics


def policy_loss(logprobs_T: Tensor, batch: TokenBatch, settings: ObjectiveSettings) -> Loss:
    """The loss of a micro-batch, given the current policy's log-probs of its tokens (with gradient).

    Losses of micro-batches add up to the batch's loss: the weights already hold the batch's denominators.
    """
    advantage_T = batch.advantage_T
    weight_T = batch.weight_S[batch.sequence_T]
    origin_T = batch.origin_S[batch.sequence_T]
    joined_T = _is(origin_T, _JOINING)
    start_T, behaviour_T = _old_policies(logprobs_T.detach(), origin_T, batch)
    proximal_T = torch.where(joined_T, behaviour_T, start_T) if settings.correction == "naive" else start_T

    ratio_T = _exp(_per_ratio(logprobs_T - proximal_T, batch, settings))
    stale_T = _per_ratio(start_T - behaviour_T, batch, settings)
    importance_T, gated_T = _importance(stale_T, advantage_T, origin_T, settings)

    clipped_ratio_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.surrogate == "cispo":
        gain_T = clipped_ratio_T.detach() * advantage_T * logprobs_T
    else:
        gain_T = torch.minimum(ratio_T * advantage_T, clipped_ratio_T * advantage_T)
        if settings.dual_clip is not None:
            gain_T = torch.maximum(gain_T, settings.dual_clip * advantage_T.clamp(max=0))
    if settings.shaping.by != "none":
        importance_T = torch.where(joined_T, (~gated_T).to(importance_T.dtype), importance_T)
        gain_T = torch.where(joined_T, advantage_T * _shaped(logprobs_T, behaviour_T, settings), gain_T)
    kl_T = _kl(logprobs_T, batch, settings)
    loss = (weight_T * (settings.kl * kl_T - importance_T * gain_T)).sum()
    diagnostics = Diagnostics(
        log_ratio_T=(logprobs_T - behaviour_T).detach(),
        clipped_T=_clipped(ratio_T.detach(), advantage_T, settings),
        gated_T=gated_T,
        kl_T=kl_T.detach(),
        origin_T=origin_T,
        moved_T=batch.other_context_S[batch.sequence_T],
    )
    return Loss(loss, diagnostics)


def _importance(
    stale_T: Tensor, advantage_T: Tensor, origin_T: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """What each token weighs for its staleness log π_start/π_behave, and which ones the gate drops."""
    ratio_T, joined_T, replayed_T = _exp(stale_T), _is(origin_T, _JOINING), origin_T == REPLAYED
    importance_T = ratio_T.clamp(max=settings.importance_cap)
    if settings.correction == "naive":  # these tokens have the ratio inside the clip
        importance_T = torch.where(joined_T, torch.ones_like(ratio_T), importance_T)
    elif settings.correction == "stopped":
        learnt_T = torch.where(advantage_T > 0, ratio_T > 1 + settings.clip_high, ratio_T < 1 - settings.clip_low)
        importance_T = torch.where(joined_T, ratio_T.clamp(max=1.0).masked_fill(learnt_T, 0.0), importance_T)
    elif settings.correction == "recomputed":
        importance_T = torch.where(joined_T, torch.ones_like(ratio_T), importance_T)
    gated_T = torch.zeros_like(replayed_T)
    if settings.ratio_gate is not None:
        gated_T = replayed_T & (stale_T.abs() > math.log(settings.ratio_gate))
    return importance_T.masked_fill(gated_T, 0.0), gated_T


def _is(origin_T: Tensor, which: Sequence[int]) -> Tensor:
    """Whether each token is of one of these origins."""
    return torch.stack([origin_T == origin for origin in which]).any(dim=0)


def _shaped(logprobs_T: Tensor, behaviour_T: Tensor, settings: ObjectiveSettings) -> Tensor:
    """x/(x + β): steep where the policy hardly writes the token, flat where it has learnt it."""
    log_x_T = logprobs_T if settings.shaping.by == "policy" else logprobs_T - behaviour_T
    x_T = _exp(log_x_T)
    return x_T / (x_T + settings.shaping.beta)


def _old_policies(current_T: Tensor, origin_T: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """log π at the start of the step and log π_behave of each token, by where it came from."""
    moved_T = batch.other_context_S[batch.sequence_T]
    if batch.proximal_T is not None:
        proximal_T = batch.proximal_T
    else:
        # Fresh samples were drawn by the policy at the start of the step; the others meet it for the first time now.
        proximal_T = torch.where(_is(origin_T, _ELSEWHERE) | moved_T, current_T, batch.behaviour_T)
    return proximal_T, torch.where(moved_T, proximal_T, batch.behaviour_T)


def _per_ratio(log_T: Tensor, batch: TokenBatch, settings: ObjectiveSettings) -> Tensor:
    """A token's log-ratio, or for GSPO its sequence's mean log-ratio, at each token."""
    if settings.ratio == "token":
        return log_T
    zeros_S = torch.zeros_like(batch.weight_S, dtype=log_T.dtype)
    sum_S = zeros_S.index_add(0, batch.sequence_T, log_T)
    length_S = zeros_S.index_add(0, batch.sequence_T, torch.ones_like(log_T))
    return (sum_S / length_S.clamp(min=1))[batch.sequence_T]


def _exp(log_T: Tensor) -> Tensor:
    return log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _kl(logprobs_T: Tensor, batch: TokenBatch, settings: ObjectiveSettings) -> Tensor:
    """k3: unbiased, never negative, zero where the policies agree."""
    if settings.kl == 0:
        return torch.zeros_like(logprobs_T)
    if batch.reference_T is None:
        raise ValueError("a KL penalty needs the reference policy's log-probs: give reference_T or set kl to 0")
    log_T = batch.reference_T - logprobs_T
    return _exp(log_T) - log_T - 1


def _clipped(ratio_T: Tensor, advantage_T: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Where the clip changed something: the gradient (PPO's minimum), or the weight (CISPO)."""
    high_T = ratio_T > 1 + settings.clip_high
    low_T = ratio_T < 1 - settings.clip_low
    if settings.surrogate == "cispo":
        return high_T | low_T
    if settings.dual_clip is not None:
        low_T = low_T | (ratio_T > settings.dual_clip)
    return (high_T & (advantage_T > 0)) | (low_T & (advantage_T < 0))
