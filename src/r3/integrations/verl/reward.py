"""What verl knows by name: the rewards, `r3_reward`, and the estimator that R³'s advantages go through.

The rewards are right or wrong by r3's verifier (or a judge of yours), and the paper's bonus for few tokens. Beside the
reward verl is told what R³ must know of an answer: whether it is right and whether it was cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.core_algos import register_adv_est
from verl.utils.fs import copy_to_local

from r3.integrations.verl import ESTIMATOR, REWARD, TRAINER, V0
from r3.integrations.verl.config import settings_of
from r3.method.reward import reward_parts
from r3.verify import MathVerifier

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


@register(REWARD)
class R3RewardManager(RewardManagerBase):  # type: ignore[misc]
    """The reward of `r3.method.reward`, a truncated answer counting as wrong."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.settings = settings_of(config)
        self.reward, self.limit = self.settings.reward.of(self.settings.name), config.data.max_response_length
        self.ends = stop_tokens(config, tokenizer)
        judged_by_user = config.reward.custom_reward_function.path is not None
        self.verifier = None if judged_by_user else MathVerifier()

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Judge the one answer in `data`."""
        item = data[-1]
        length = int(item.batch["attention_mask"][-len(item.batch["responses"]) :].sum())
        tokens = item.batch["responses"][:length]
        truncated = int(tokens[-1]) not in self.ends
        right = False if truncated else await self._right(item.non_tensor_batch, tokens)
        parts = reward_parts(right, length, self.reward, limit=self.limit)
        told = {"acc": float(right), "truncated": float(truncated)}
        return {
            "reward_score": sum(parts.values()),
            "reward_extra_info": told | {f"reward_{name}": value for name, value in parts.items()},
        }

    async def _right(self, row: Any, tokens: Any) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        gold = row["reward_model"]["ground_truth"]
        if self.verifier is not None:  # it waits for worker processes: in a thread, or other answers would wait too
            return (await asyncio.to_thread(self.verifier.verify, text, gold)).right
        asked = {"data_source": row["data_source"], "solution_str": text, "ground_truth": gold}
        told = await asyncio.to_thread(self.compute_score, **asked, extra_info=row.get("extra_info", {}))
        told = await told if asyncio.iscoroutine(told) else told
        return float(told["score"] if isinstance(told, dict) else told) > self.settings.right_above


def stop_tokens(config: Any, tokenizer: Any) -> set[int]:
    """Ids that end an answer: an answer that ends in none of them was cut."""
    model = config.actor_rollout_ref.model
    try:
        ends = GenerationConfig.from_pretrained(copy_to_local(model.path)).eos_token_id
    except OSError:  # no generation_config.json: the tokenizer alone knows, to the rollout engine as well
        ends = None
    given = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    stops = {*given, tokenizer.eos_token_id} - {None}
    if not stops:
        raise ValueError(f"{model.path} names no end-of-text token, so no answer could ever end: set eos_token")
    return stops
