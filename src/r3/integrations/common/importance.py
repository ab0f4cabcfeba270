"""Importance weights of stale tokens, for trainers whose loss clips around the policy at the start of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from r3.method.objective import LOG_RATIO_LIMIT
from r3.method.settings import ObjectiveSettings


def importance(
    proximal_BC: Tensor, behaviour_BC: Tensor, mask_BC: Tensor, settings: ObjectiveSettings, *, by_sequence: bool
) -> Tensor:
    """w of `r3.method.objective`: min(π_prox/π_behave, C), and 0 beyond the gate. B rows, C tokens."""
    log_BC = (proximal_BC - behaviour_BC) * mask_BC
    if by_sequence:
        log_BC = (log_BC.sum(1, keepdim=True) / mask_BC.sum(1, keepdim=True)).expand_as(log_BC)
    weight_BC = log_BC.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=settings.importance_cap)
    if settings.ratio_gate is not None:
        weight_BC = weight_BC.masked_fill(log_BC.abs() > math.log(settings.ratio_gate), 0.0)
    return weight_BC


def importance_sums(weight_T: Tensor) -> Tensor:
    """Sums over replayed tokens' weights for `importance_metrics`; those of several processes can be added."""
    n_T = torch.ones_like(weight_T)
    return torch.stack([x.sum() for x in (weight_T, weight_T.square(), n_T * (weight_T == 0), n_T)])


def importance_metrics(sums: Tensor) -> dict[str, float]:
    """Mean weight, share of gated tokens and effective sample size of the replayed tokens."""
    total, squares, gated, n = sums.tolist()
    return {
        "replay/importance_mean": total / n,
        "replay/gated_share": gated / n,
        "replay/ess": total**2 / (n * squares) if squares else 0.0,
    }
