"""verl's rows in TransferQueue: answers read out of them, and rows of other sequences put beside them.

A row's key is `{uid of its prompt}_{session}_{output}`. Uids are new at each draw; the trainer knows what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from r3.integrations.common.groups import Answer
from r3.integrations.verl import REWARD
from r3.method.replay import outcome_reward
from r3.samples import FloatArray, IntArray, Sample

ANSWER = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields"]
PARTS = {"reward_correct": "correct", "reward_length": "length"}
"""What the reward manager calls the parts of a reward, and what the method calls them."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A sequence that joins the batch: a past sample under its group's prompt, or a fresh one under the plain one."""

    key: str
    like: str
    """Key of a row of its group, for all that a group's rows have in common."""
    prompt: IntArray
    sample: Sample


def get(batch: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
    """The fields of the batch's rows, row by row; those that no row has are left out."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    columns = {name: data[name] for name in fields if name in data}
    return {name: list(column.unbind(0) if torch.is_tensor(column) else column) for name, column in columns.items()}


def answers(batch: KVBatchMeta) -> dict[str, dict[str, Answer]]:
    """The batch's answers, by the uid of their prompt and then by key, in the order of sessions; not yet entropies."""
    data = get(batch, ANSWER)
    by_uid: dict[str, dict[str, Answer]] = {}
    for row, key in sorted(enumerate(batch.keys), key=lambda row_and_key: int(row_and_key[1].rsplit("_", 2)[1])):
        uid, _, output = key.rsplit("_", 2)
        if output != "0" or not bool(data["response_mask"][row].all()):
            raise ValueError("R³ trains on text answered in one turn: use the agent loop single_turn_agent")
        behaviour = data["rollout_log_probs"][row].numpy() if "rollout_log_probs" in data else None
        tokens = data["responses"][row].numpy()
        by_uid.setdefault(uid, {})[key] = _answer(
            data["prompts"][row].numpy(), tokens, behaviour, data["extra_fields"][row]
        )
    return by_uid


def _answer(prompt: IntArray, tokens: IntArray, behaviour: FloatArray | None, extra: Any) -> Answer:
    told: Mapping[str, float] = getattr(extra, "data", extra).get("reward_extra_info", {})
    if missing := {"acc", "truncated", *PARTS} - set(told):
        raise ValueError(
            f"an answer came without {', '.join(sorted(missing))}: set reward.reward_manager.name={REWARD}"
        )
    parts = {part: float(told[name]) for name, part in PARTS.items()}
    # Log-probs are filled in once the actor has made them, where the rollout engine was not asked for its own.
    logprobs = np.zeros(len(tokens), np.float32) if behaviour is None else behaviour
    return Answer(prompt, tokens, logprobs, None, bool(told["truncated"]), bool(told["acc"]), parts)


def add(batch: KVBatchMeta, joining: Sequence[Joining]) -> KVBatchMeta:
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
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=new_tags)
    return KVBatchMeta(
        keys=batch.keys + keys,
        tags=batch.tags + new_tags,
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _row(new: Joining, like: dict[str, Any]) -> dict[str, Any]:
    if "routed_experts" in like or like["position_ids"].dim() > 1:
        raise ValueError(
            "a replayed row has no expert routes and no images: turn router_replay off, use a text model, or set "
            "++r3_method.name=r3-no-replay"
        )
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
