"""`python -m r3.integrations.verl.v0`: verl's V0 trainer, `RayPPOTrainer`, with R³; options are verl's main_ppo's.

Methods that verl's `fit` calls are extended around `super()`; `core.py` has what they do. verl hands its batch from
stage to stage as one DataProto, padded to one width: answers are read out of it, rows are added to it and taken out.
verl's `main_ppo` and task runner name their classes outright, so each of those two names is pointed at ours, in the
process that is about to use it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import Token
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.model import compute_position_id_with_mask

from r3.integrations.common import Answer
from r3.integrations.verl.config import checked, conflicts_of_v0
from r3.integrations.verl.core import (
    NO_ROUTES,
    Core,
    Joining,
    Passed,
    Reflection,
    WithCore,
    answer_of,
    key_of,
    uid_of,
)
from r3.integrations.verl.data import check_ids
from r3.integrations.verl.reward import DECIDED
from r3.method.replay import outcome_reward
from r3.samples import FloatArray, IntArray

KEYS = "r3_key"
"""The column with a row's key; the rows that fill the batch up have an empty one."""


class R3RayTrainer(WithCore, RayPPOTrainer):  # type: ignore[misc]
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

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_dataloader)

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
            add_prompts(batch, asked)
        return super()._get_gen_batch(batch)

    def _balance_batch(self, batch: DataProto, metrics: dict[str, Any], *more: Any, **named: Any) -> None:
        self._step_metrics = metrics
        name_rows(batch)
        self._drawn = list(batch.non_tensor_batch[KEYS])
        self.r3.answered(answers(batch))
        joining = self.r3.joining()
        until = self.r3.filled_up(len(batch) + len(joining), self._get_dp_size(self.actor_rollout_wg, "actor"))
        add_rows(batch, joining, until=until, end=self.tokenizer.eos_token_id)
        super()._balance_batch(batch, metrics, *more, **named)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, Any]:
        made, mfu = super()._compute_old_log_prob(batch)
        names = [key or f"empty {row}" for row, key in enumerate(batch.non_tensor_batch[KEYS])]
        by_name = dict(zip(names, passed(batch, made), strict=True))
        drawn_known, tokens = "rollout_log_probs" in batch.batch, int(batch.batch["response_mask"].sum())
        decided = self.r3.learn(by_name, tokens=tokens, drawn_known=drawn_known)
        as_drawn_now(batch, list(self.r3.batch.joined.values()), made)
        self._decided = DECIDED.set([decided[name] for name in names])
        return made, mfu

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self._decided is not None:
            DECIDED.reset(self._decided)
        with self.r3.grown_minibatches(len(batch)):
            output = super()._update_actor(batch)
        self._step_metrics.update(self.r3.record({**self._step_metrics, **output.meta_info["metrics"]}))
        keep(batch, self._drawn)  # what verl counts from here on is this step's answers
        return output

    def _log_rollout_data(self, batch: DataProto, told: dict[str, Any], *more: Any, **named: Any) -> None:
        told = {name: batch.non_tensor_batch[name] for name in told}  # verl's are of all rows
        super()._log_rollout_data(batch, told, *more, **named)


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


# ---------------------------------------------------------------- rows in a DataProto


def add_prompts(batch: DataProto, asked: Sequence[Reflection]) -> None:
    """Reflection prompts below the batch's own, each like its query's row."""
    if not asked:
        return
    more = batch.select_idxs([prompt.position for prompt in asked])
    more.non_tensor_batch["uid"] = _column([prompt.uid for prompt in asked])
    more.non_tensor_batch["raw_prompt"] = _column([prompt.turns for prompt in asked])
    _append(batch, more)


def name_rows(batch: DataProto) -> None:
    """Give every row its key: a prompt's rows are its sessions, in order."""
    seen: Counter[str] = Counter()
    keys = []
    for uid in batch.non_tensor_batch["uid"]:
        keys.append(key_of(uid, seen[uid]))
        seen[uid] += 1
    batch.non_tensor_batch[KEYS] = _column(keys)


def answers(batch: DataProto) -> dict[str, dict[str, Answer]]:
    """The batch's answers, by the uid of their prompt and then by key, in the order of sessions; not yet entropies."""
    columns, told_of = batch.batch, batch.non_tensor_batch
    width, named = columns["prompts"].shape[1], batch.meta_info.get("reward_extra_keys", [])
    by_uid: dict[str, dict[str, Answer]] = {}
    for row, key in enumerate(told_of[KEYS]):
        asked, answered = (columns["attention_mask"][row, part].bool() for part in (slice(width), slice(width, None)))
        if not torch.equal(columns["response_mask"][row].bool(), answered):
            raise ValueError("R³ trains on text answered in one turn: use the agent loop single_turn_agent")
        drawn = columns["rollout_log_probs"][row][answered].numpy() if "rollout_log_probs" in columns else None
        prompt, tokens = columns["prompts"][row][asked].numpy(), columns["responses"][row][answered].numpy()
        told = {name: told_of[name][row] for name in named}
        by_uid.setdefault(uid_of(key), {})[key] = answer_of(prompt, tokens, drawn, told)
    return by_uid


def add_rows(batch: DataProto, joining: Sequence[Joining], *, until: int, end: int) -> None:
    """Rows for the sequences that join, then empty ones, of the token `end`, until there are so many."""
    rows = {key: row for row, key in enumerate(batch.non_tensor_batch[KEYS])}
    likes = [rows[new.like] for new in joining]
    empty = until - len(batch) - len(joining)
    if not likes and not empty:
        return
    more = batch.select_idxs([*likes, *([0] * empty)])
    filled = [_row(more.batch[i], new.prompt, new.sample.tokens, new.sample.logprobs) for i, new in enumerate(joining)]
    for row, new in zip(filled, joining, strict=True):
        row["rm_scores"][len(new.sample) - 1] = outcome_reward(new.sample)
    ends, nothing = np.array([end], np.int32), np.zeros(1, np.float32)
    blank = [_row(more.batch[len(joining) + i], ends, ends, nothing, trained=False) for i in range(empty)]
    more.batch = torch.stack([*filled, *blank])
    more.non_tensor_batch[KEYS] = _column([*(new.key for new in joining), *([""] * empty)])
    more.non_tensor_batch["uid"][len(joining) :] = [f"empty {i}" for i in range(empty)]
    _append(batch, more)


def passed(batch: DataProto, made: DataProto) -> list[Passed]:
    """What verl's pass gave, row by row."""
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    rows = zip(made.batch["old_log_probs"], made.batch["entropys"], lengths, strict=True)
    return [Passed(old[:length], entropy[:length]) for old, entropy, length in rows]


def as_drawn_now(batch: DataProto, keys: Sequence[str], made: DataProto) -> None:
    """Make verl's own correction 1 for these rows: it is for this step's rollouts."""
    if keys and "rollout_log_probs" in batch.batch:
        at = torch.from_numpy(np.isin(batch.non_tensor_batch[KEYS], list(keys)))
        batch.batch["rollout_log_probs"][at] = made.batch["old_log_probs"][at].to(batch.batch["rollout_log_probs"])


def keep(batch: DataProto, keys: Sequence[str]) -> None:
    """Leave these rows alone in the batch."""
    batch.reorder(torch.from_numpy(np.flatnonzero(np.isin(batch.non_tensor_batch[KEYS], list(keys)))))


def _append(batch: DataProto, more: DataProto) -> None:
    both = DataProto.concat([batch, more])
    batch.batch, batch.non_tensor_batch = both.batch, both.non_tensor_batch


def _column(values: Sequence[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _row(
    like: TensorDict, prompt: IntArray, tokens: IntArray, drawn: FloatArray, *, trained: bool = True
) -> TensorDict:
    if "routed_experts" in like or like["position_ids"].dim() > 1:
        raise ValueError(NO_ROUTES)
    prompts, asked = _padded(prompt, len(like["prompts"]), left=True)
    responses, answered = _padded(tokens, len(like["responses"]))
    attention = torch.cat([asked, answered]).to(like["attention_mask"])
    values: Mapping[str, Tensor] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "attention_mask": attention,
        "position_ids": compute_position_id_with_mask(attention[None])[0],
        "response_mask": answered * trained,
        "rm_scores": torch.zeros(len(responses)),
    }
    row = like.clone()
    for name, value in values.items():
        row[name] = value.to(like[name])
    if "rollout_log_probs" in like:
        row["rollout_log_probs"] = _padded(drawn, len(responses))[0].to(like["rollout_log_probs"])
    return row


def _padded(values: IntArray | FloatArray, width: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """The values padded with 0 to that width, and 1 where they are."""
    if len(values) > width:
        raise ValueError(
            f"a sequence of {len(values)} tokens that joins the batch is longer than data.max_prompt_length or "
            f"data.max_response_length, {width}: leave both as they were when the run began"
        )
    at = slice(width - len(values), width) if left else slice(len(values))
    padded, mask = torch.zeros(width, dtype=torch.from_numpy(values).dtype), torch.zeros(width, dtype=torch.int64)
    padded[at], mask[at] = torch.from_numpy(values), 1
    return padded, mask


if __name__ == "__main__":
    from r3.integrations.verl import v0  # under its name, by which Ray's processes find its classes

    v0.main()
