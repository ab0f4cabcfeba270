"""verl's rows in TransferQueue: answers read out of them, and rows of other sequences put beside them.

A row's key is `{uid of its prompt}_{session}_{output}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from r3.integrations.common import Answer
from r3.integrations.verl.core import NO_ROUTES, Joining, Passed, answer_of, session_of, uid_of
from r3.method.replay import outcome_reward

ANSWER = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields"]
PASSED = ["old_log_probs", "entropy", "rollout_log_probs", "response_mask"]


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
