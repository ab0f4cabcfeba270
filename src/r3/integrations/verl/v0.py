"""`python -m r3.integrations.verl.v0`: verl's V0 trainer, `RayPPOTrainer`, with R³; options are verl's main_ppo's.

Methods that verl's `fit` calls are extended around `super()`; `core.py` has what they do, `dataproto.py` how it lies in
the one DataProto that goes from stage to stage. verl's `main_ppo` and task runner name their classes outright, so each
of those two names is pointed at ours, in the process that is about to use it.
"""

from __future__ import annotations

import math
import sys
from contextvars import Token
from typing import Any

import ray
from verl import DataProto
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from r3.integrations.verl import dataproto
from r3.integrations.verl.config import checked, conflicts_of_v0
from r3.integrations.verl.core import Core
from r3.integrations.verl.dataset import check_ids
from r3.integrations.verl.estimator import DECIDED


class R3RayTrainer(RayPPOTrainer):  # type: ignore[misc]
    """`RayPPOTrainer` that learns from homogeneous groups too."""

    def __init__(self, config: Any, *more: Any, **named: Any) -> None:
        self.r3 = Core(config, checked(config, conflicts_of_v0(config)))
        self._validating = False
        self._drawn: list[str] = []
        """Keys of the rows that were generated."""
        self._step_metrics: dict[str, Any] = {}
        """The dictionary that verl logs at the end of the step."""
        self._decided: Token[Any] | None = None
        super().__init__(config, *more, **named)

    def fit(self) -> None:
        try:
            super().fit()
        finally:
            self.r3.close()

    def _create_dataloader(self, *more: Any, **named: Any) -> None:
        super()._create_dataloader(*more, **named)
        check_ids(self.train_dataset, self.r3.settings.query_key)

    def _validate(self, *more: Any, **named: Any) -> Any:
        self._validating = True
        try:
            return super()._validate(*more, **named)
        finally:
            self._validating = False

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        if not self._validating:
            rollout, rows = self.config.actor_rollout_ref.rollout, batch.non_tensor_batch
            workers = rollout.agent.num_workers  # verl deals the prompts out to them in equal parts
            multiple = workers // math.gcd(workers, rollout.n)
            uids = list(rows["uid"])
            asked = self.r3.ask(self.global_steps, rows["raw_prompt"], rows["index"], uids, multiple_of=multiple)
            dataproto.add_prompts(batch, asked)
        return super()._get_gen_batch(batch)

    def _balance_batch(self, batch: DataProto, metrics: dict[str, Any], *more: Any, **named: Any) -> None:
        self._step_metrics = metrics
        dataproto.name_rows(batch)
        self._drawn = list(batch.non_tensor_batch[dataproto.KEYS])
        self.r3.answered(dataproto.answers(batch))
        joining = self.r3.joining()
        until = self.r3.filled_up(len(batch) + len(joining), self._get_dp_size(self.actor_rollout_wg, "actor"))
        dataproto.add_rows(batch, joining, until=until, end=self.tokenizer.eos_token_id)
        super()._balance_batch(batch, metrics, *more, **named)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, Any]:
        made, mfu = super()._compute_old_log_prob(batch)
        names = [key or f"empty {row}" for row, key in enumerate(batch.non_tensor_batch[dataproto.KEYS])]
        passed = dict(zip(names, dataproto.passed(batch, made), strict=True))
        drawn_known, tokens = "rollout_log_probs" in batch.batch, int(batch.batch["response_mask"].sum())
        decided = self.r3.learn(passed, tokens=tokens, drawn_known=drawn_known)
        dataproto.as_drawn_now(batch, list(self.r3.batch.joined.values()), made)
        self._decided = DECIDED.set([decided[name] for name in names])
        return made, mfu

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self._decided is not None:
            DECIDED.reset(self._decided)
        actor = self.config.actor_rollout_ref.actor
        configured = actor.ppo_mini_batch_size
        actor.ppo_mini_batch_size = self.r3.minibatch(len(batch))
        try:
            output = super()._update_actor(batch)
        finally:
            actor.ppo_mini_batch_size = configured
        self._step_metrics.update(self.r3.record({**self._step_metrics, **output.meta_info["metrics"]}))
        dataproto.keep(batch, self._drawn)  # what verl counts from here on is this step's answers
        return output

    def _log_rollout_data(self, batch: DataProto, told: dict[str, Any], *more: Any, **named: Any) -> None:
        told = {name: batch.non_tensor_batch[name] for name in told}  # verl's are of all rows
        super()._log_rollout_data(batch, told, *more, **named)

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
            steps_per_epoch=len(self.train_dataloader),
        )


@ray.remote
class R3TaskRunner:
    """verl's V0 task runner, whose trainer is R³'s."""

    def run(self, config: Any) -> None:
        main_ppo_v0.RayPPOTrainer = R3RayTrainer
        main_ppo_v0.TaskRunner.__ray_metadata__.modified_class().run(config)


def main() -> None:
    """verl's command, on its V0 trainer."""
    main_ppo_v0.TaskRunner = R3TaskRunner
    sys.argv += ["trainer.use_v1=false", "transfer_queue.enable=false"]
    main_ppo.main()


if __name__ == "__main__":
    from r3.integrations.verl import v0  # under its name, by which Ray's processes find its classes

    v0.main()
