"""`R3Trainer`: verl's synchronous V1 trainer with R³'s replay, reflection and ranking rewards.

Stage methods are extended around `super()`; `core.py` has what they do, `transfer.py` how it lies in TransferQueue.
"""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from r3.integrations.verl import TRAINER, transfer
from r3.integrations.verl.config import checked, conflicts_of_v1
from r3.integrations.verl.core import Core
from r3.integrations.verl.dataset import check_ids
from r3.integrations.verl.estimator import DECIDED


@register_trainer(TRAINER)
class R3Trainer(PPOTrainerSync):  # type: ignore[misc]
    """`PPOTrainerSync` that learns from homogeneous groups too; `trainer.v1.trainer_mode=r3_sync`."""

    def __init__(self, config: Any) -> None:
        self.r3 = Core(config, checked(config, conflicts_of_v1(config)))
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this string wherever it means this kind of trainer
        super().__init__(config)
        self._rows = 0
        """Of the batch, before verl fills it up."""

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            self.r3.close()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        check_ids(self.train_dataset, self.r3.settings.query_key)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        asked = self.r3.ask(self.global_steps, batch["raw_prompt"], batch["index"], batch["uid"])
        if not asked:
            return batch
        more = tu.index_select_tensor_dict(batch, [prompt.position for prompt in asked])
        tu.assign_non_tensor_stack(more, "uid", [prompt.uid for prompt in asked])
        tu.assign_non_tensor_stack(more, "raw_prompt", [prompt.turns for prompt in asked])
        both = tu.concat_tensordict([batch, more])
        tu.assign_non_tensor_data(both, "global_steps", self.global_steps)
        return both

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> KVBatchMeta:
        # verl would wait for the plain prompts alone, and take the reflection groups for the next step's.
        return super()._step_once(metrics, timing_raw, len(self.r3.batch.prompts))

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *more: Any, **named: Any) -> KVBatchMeta:
        self.r3.answered(transfer.answers(batch))
        batch = transfer.add(batch, self.r3.joining())
        self._rows = len(batch)
        return super()._balance_batch(batch, metrics, *more, **named)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return self.r3.filled_up(self._rows, dp_size)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        passed, tokens, drawn_known = transfer.passed(batch)
        decided = self.r3.learn(passed, tokens=tokens, drawn_known=drawn_known)
        if drawn_known:
            transfer.as_drawn_now(batch, list(self.r3.batch.joined.values()), passed)
        token = DECIDED.set([decided[key] for key in batch.keys])
        try:
            return super()._compute_advantage(batch, metrics)
        finally:
            DECIDED.reset(token)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        actor = self.config.actor_rollout_ref.actor
        configured = actor.ppo_mini_batch_size
        actor.ppo_mini_batch_size = self.r3.minibatch(len(batch))
        try:
            return super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size = configured

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *more: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *more, **named)
        metrics.update(self.r3.record(metrics))

    def _save_checkpoint(self) -> None:
        self.r3.save(self.global_steps)
        super()._save_checkpoint()
        self.r3.prune()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.r3.open(
            self.tokenizer,
            step=self.global_steps,
            total_steps=self.total_training_steps,
            steps_per_epoch=self.steps_per_epoch,
        )
