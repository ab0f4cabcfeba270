"""How R³'s advantages reach verl: through an estimator, at the place where verl asks for advantages."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from r3.integrations.verl import ESTIMATOR, TRAINER, V0

DECIDED: ContextVar[Sequence[Tensor] | None] = ContextVar("r3 advantages, row by row", default=None)
"""Set by the trainers, in the order of verl's rows."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def decided_advantages(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Eq. 3's advantages as R³'s trainer decided them."""
    decided = DECIDED.get()
    if decided is None:
        raise RuntimeError(
            f"adv_estimator={ESTIMATOR} is that of R³'s own trainers: set trainer.v1.trainer_mode={TRAINER}, or start "
            f"python -m {V0} in the place of verl.trainer.main_ppo"
        )
    advantages_BT = torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device)
    for row, advantage_T in enumerate(decided):
        advantages_BT[row, : len(advantage_T)] = advantage_T
    advantages_BT *= response_mask
    return advantages_BT, advantages_BT
