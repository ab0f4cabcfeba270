"""`R3Trainer`: verl's synchronous V1 trainer with R³'s replay, reflection and ranking rewards.

Stage methods are extended around `super()`; `core.py` has what they do. verl's rows lie in TransferQueue, each under
`{uid of its prompt}_{session}_{output}`: answers are read out of it, rows of other sequences put beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from r3.integrations.common import Answer
from r3.integrations.verl import TRAINER
from r3.integrations.verl.config import checked, conflicts_of_v1
from r3.integrations.verl.core import NO_ROUTES, Core, Joining, Passed, WithCore, answer_of, session_of, uid_of
from r3.integrations.verl.data import check_ids
from r3.integrations.verl.reward import DECIDED
from r3.method.replay import outcome_reward

ANSWER = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields"]
PASSED = ["old_log_probs", "entropy", "rollout_log_probs", "response_mask"]


@register_trainer(TRAINER)
class R3Trainer(WithCore, PPOTrainerSync):  # type: ignore[misc]
    """`PPOTrainerSync` that learns from homogeneous groups too; `trainer.v1.trainer_mode=r3_sync`."""

    def __init__(self, config: Any) -> None:
        self.r3 = Core(config, checked(config, conflicts_of_v1(config)))
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this string wherever it means this kind of trainer
        super().__init__(config)
        self._rows = 0
        """How many rows the batch has before verl fills it up."""

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
        self.r3.answered(answers(batch))
        batch = add_rows(batch, self.r3.joining())
        batch.reorder(self.r3.in_order(batch.keys))
        self._rows = len(batch)
        return super()._balance_batch(batch, metrics, *more, **named)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return self.r3.filled_up(self._rows, dp_size)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        by_key, tokens, drawn_known = passed(batch)
        decided = self.r3.learn(by_key, tokens=tokens, drawn_known=drawn_known)
        if drawn_known:
            as_drawn_now(batch, list(self.r3.batch.joined.values()), by_key)
        token = DECIDED.set([decided[key] for key in batch.keys])
        try:
            return super()._compute_advantage(batch, metrics)
        finally:
            DECIDED.reset(token)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self.r3.grown_minibatches(len(batch)):
            return super()._update_actor(batch, metrics)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *more: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *more, **named)
        metrics.update(self.r3.record(metrics))


# ---------------------------------------------------------------- rows in TransferQueue


def get(batch: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
    """The fields of the batch's rows, row by row; those that no row has are left out."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    columns = {name: data[name] for name in fields if name in data}
    return {name: list(column.unbind(0) if torch.is_tensor(column) else column) for name, column in columns.items()}


def answers(batch: KVBatchMeta) -> dict[str, dict[str, Answer]]:
    """The batch's answers, by the uid of their prompt and then by key, in the order of sessions; not yet entropies."""
    data = get(batch, ANSWER)
    by_uid: dict[str, dict[str, Answer]] = {}
    for row, key in sorted(enumerate(batch.keys), key=lambda row_and_key: session_of(row_and_key[1])):
        if not key.endswith("_0") or not bool(data["response_mask"][row].all()):
            raise ValueError("R³ trains on text answered in one turn: use the agent loop single_turn_agent")
        drawn = data["rollout_log_probs"][row].numpy() if "rollout_log_probs" in data else None
        prompt, tokens = data["prompts"][row].numpy(), data["responses"][row].numpy()
        told = getattr(data["extra_fields"][row], "data", data["extra_fields"][row]).get("reward_extra_info", {})
        by_uid.setdefault(uid_of(key), {})[key] = answer_of(prompt, tokens, drawn, told)
    return by_uid


def passed(batch: KVBatchMeta) -> tuple[dict[str, Passed], int, bool]:
    """What verl's pass gave by key, how many tokens are trained on, and whether the engine gave log-probs too."""
    data = get(batch, PASSED)
    rows = zip(batch.keys, data["old_log_probs"], data["entropy"], strict=True)
    tokens = sum(int(mask.sum()) for mask in data["response_mask"])
    return {key: Passed(old, entropy) for key, old, entropy in rows}, tokens, "rollout_log_probs" in data


def as_drawn_now(batch: KVBatchMeta, keys: Sequence[str], by_key: Mapping[str, Passed]) -> None:
    """Make verl's own correction 1 for these rows: it is for this step's rollouts."""
    if not keys:
        return
    old = torch.nested.as_nested_tensor([by_key[key].old_logprobs for key in keys], layout=torch.jagged)
    fields = TensorDict({"rollout_log_probs": old}, batch_size=len(keys))
    tq.kv_batch_put(keys=list(keys), partition_id=batch.partition_id, fields=fields)


def add_rows(batch: KVBatchMeta, joining: Sequence[Joining]) -> KVBatchMeta:
    """The batch with rows for the sequences that join it, which go through verl's passes like any other."""
    if not joining:
        return batch
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    patterns = list(dict.fromkeys(new.like for new in joining))
    data = tq.kv_batch_get(keys=patterns, partition_id=batch.partition_id)
    likes = {key: data[i] for i, key in enumerate(patterns)}
    rows = [_row(new, {name: likes[new.like][name] for name in list(data.keys())}) for new in joining]
    # verl keeps rows of this tag out of its own statistics of answers, where past ones do not belong either.
    new_tags = [
        {
            **tags[new.like],
            "is_padding": True,
            "prompt_len": len(new.prompt),
            "response_len": len(new.sample),
            "seq_len": len(new.prompt) + len(new.sample),
        }
        for new in joining
    ]
    keys = [new.key for new in joining]
    tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows), tags=new_tags
    )
    return KVBatchMeta(
        keys=batch.keys + keys,
        tags=batch.tags + new_tags,
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _row(new: Joining, like: dict[str, Any]) -> dict[str, Any]:
    if "routed_experts" in like or like["position_ids"].dim() > 1:
        raise ValueError(NO_ROUTES)
    prompts, responses = torch.tensor(new.prompt, dtype=torch.int64), torch.tensor(new.sample.tokens, dtype=torch.int64)
    mask = torch.ones_like(responses)
    scores = torch.zeros(len(responses))
    scores[-1] = outcome_reward(new.sample)
    row = {
        **like,
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": scores,
    }
    if "rollout_log_probs" in like:
        row["rollout_log_probs"] = torch.tensor(new.sample.logprobs)
    return row
