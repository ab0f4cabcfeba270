"""`R3Trainer`: verl's synchronous V1 trainer with R³'s replay, reflection and ranking rewards.

Stage methods are extended around `super()`. Reflection prompts join the batch that is asked; past samples join the rows
once the answers are judged, before verl balances them over its workers and computes their log-probs; with the entropies
of that pass `r3.algorithm` decides the advantages, and verl's own loss does the rest.

Departures from the paper, and choices verl makes for us:
- Joined rows make a batch larger. The number of optimiser updates stays what `train_batch_size / ppo_mini_batch_size`
  says: mini-batches grow instead, filled up with verl's empty rows.
- verl's losses count rows (or tokens), the method counts groups and their members: advantages are scaled by the ratio.
- Staleness: verl clips around its `old_log_probs`, the policy at the start of the step, for every row. Replayed tokens'
  truncated importance weights are folded into a per-token advantage. `correction: naive` is not offered here.
- Rows of advantage 0 stay in the batch: verl computes them (a KL loss counts them), r3's loop skips them.
- A prompt whose rollouts failed leaves the batch, and so does its reflection group.
"""

from __future__ import annotations

import math
import os
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from r3.algorithm import Algorithm, Prompt
from r3.integrations.common.buffer_copies import FILE, open_buffer, prune_copies, save_buffer
from r3.integrations.common.groups import Answer, scale_of, to_groups
from r3.integrations.common.importance import importance, importance_metrics, importance_sums
from r3.integrations.common.prompts import turns_of
from r3.integrations.common.recorder import RunRecorder
from r3.integrations.verl import ESTIMATOR, KEY, TRAINER, transfer
from r3.integrations.verl.config import checked
from r3.integrations.verl.dataset import Templated, check_ids, query_of
from r3.integrations.verl.record import described, told_of
from r3.method.mixed import StepResult
from r3.method.weights import training_prompts
from r3.samples import Group

PASSED = ["old_log_probs", "entropy", "rollout_log_probs", "response_mask"]
_DECIDED: ContextVar[list[Tensor] | None] = ContextVar("r3 advantages, row by row", default=None)


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def decided_advantages(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Eq. 3's advantages as `R3Trainer` decided them, at the place where verl asks for advantages."""
    decided = _DECIDED.get()
    if decided is None:
        raise RuntimeError(f"adv_estimator={ESTIMATOR} is R³'s own trainer's: set trainer.v1.trainer_mode={TRAINER}")
    advantages_BT = pad_sequence(decided, batch_first=True).to(response_mask.device) * response_mask
    return advantages_BT, advantages_BT


@dataclass
class _Batch:
    """A step's batch on its way through verl's stages."""

    prompts: dict[str, Prompt]
    """By verl's uid."""
    counts: dict[str, float]
    answers: list[tuple[Prompt, dict[str, Answer]]] = field(default_factory=list)
    """By the row's key; those whose rollouts failed are left out."""
    joined: dict[tuple[int, int], str] = field(default_factory=dict)
    """Keys of the rows that joined, by group and member."""
    rows: int = 0


@register_trainer(TRAINER)
class R3Trainer(PPOTrainerSync):  # type: ignore[misc]
    """`PPOTrainerSync` that learns from homogeneous groups too; `trainer.v1.trainer_mode=r3_sync`."""

    def __init__(self, config: Any) -> None:
        self.r3_settings = checked(config)
        self.r3_step: StepResult | None = None
        """The last batch's mixed groups and advantages."""
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this string wherever it means this kind of trainer
        super().__init__(config)
        actor = config.actor_rollout_ref.actor
        self._minibatches = config.data.train_batch_size // actor.ppo_mini_batch_size
        self._updates = self._minibatches * actor.ppo_epochs
        self._r3: _Batch | None = None
        self._r3_metrics: dict[str, float] = {}
        self._r3_algorithm: Algorithm | None = None
        self._r3_recorder: RunRecorder | None = None
        """Writes what r3 view reads."""

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            try:
                self._recorder.close()
            finally:
                self._algorithm.buffer.close()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        check_ids(self.train_dataset, self.r3_settings.query_key)

    # ------------------------------------------------------------- what is asked

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        settings, epoch = self.r3_settings, self._epoch
        keys = zip(batch["raw_prompt"], batch["index"], strict=True)
        queries = [(query_of(prompt, index, settings.query_key), epoch) for prompt, index in keys]
        asked = self._algorithm.ask(queries, step=self.global_steps).limited(settings.max_reflections)
        self._recorder.begin(self.global_steps)
        counts = {f"reflection/{name}": float(n) for name, n in asked.counts.items()}
        uids = [str(uuid.uuid4()) for _ in asked.reflections]
        self._r3 = _Batch(dict(zip([*batch["uid"], *uids], asked.prompts, strict=True)), counts)
        if not uids:
            return batch
        more = tu.index_select_tensor_dict(batch, [prompt.position for prompt in asked.reflections])
        tu.assign_non_tensor_stack(more, "uid", uids)
        tu.assign_non_tensor_stack(more, "raw_prompt", [turns_of(prompt.text) for prompt in asked.reflections])
        both = tu.concat_tensordict([batch, more])
        tu.assign_non_tensor_data(both, "global_steps", self.global_steps)
        return both

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> KVBatchMeta:
        # verl would wait for the plain prompts alone, and take the reflection groups for the next step's.
        return super()._step_once(metrics, timing_raw, len(self._at_hand.prompts))

    # ------------------------------------------------------------- what joins

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *more: Any, **named: Any) -> KVBatchMeta:
        here = self._at_hand
        self._take_answers(transfer.answers(batch))
        preview = self._algorithm.preview(self._groups(), version=self._version)  # entropies come later
        batch = transfer.add(batch, self._joining(preview))
        here.rows = len(batch)
        return super()._balance_batch(batch, metrics, *more, **named)

    def _take_answers(self, answers: dict[str, dict[str, Answer]]) -> None:
        here = self._at_hand
        answered = [(prompt, answers[uid]) for uid, prompt in here.prompts.items() if uid in answers]
        plain = {prompt.position for prompt, _ in answered if prompt.context.kind == "plain"}
        here.answers = [(prompt, by_key) for prompt, by_key in answered if prompt.position in plain]
        here.counts["groups/failed"] = float(len(here.prompts) - len(here.answers))
        for prompt, by_key in answered:
            if prompt.context.kind == "reflection" and len(next(iter(by_key.values())).prompt) < len(prompt.tokens):
                raise ValueError(
                    f"verl cut a reflection prompt of {len(prompt.tokens)} tokens from the left: raise "
                    f"data.max_prompt_length or lower ++{KEY}.reflection.max_prompt_tokens"
                )

    def _joining(self, preview: StepResult) -> list[transfer.Joining]:
        """Past samples under their group's prompt; reflection answers under the plain one, where settings say so."""
        joining = []
        for number, (mixed, (_, answers)) in enumerate(zip(preview.groups, self._at_hand.answers, strict=True)):
            like = next(iter(answers))
            for index, member in enumerate(mixed.members):
                for prompt, other_context in training_prompts(mixed.group, member, self.r3_settings):
                    if member.origin == "replayed" or other_context:
                        key = f"{like.rsplit('_', 2)[0]}_{self.config.actor_rollout_ref.rollout.n + index}_0"
                        self._at_hand.joined[number, index] = key
                        joining.append(transfer.Joining(key, like, prompt, member.sample))
        return joining

    # ------------------------------------------------------------- mini-batches: as many as ever, but larger

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows that the batch is filled up to: mini-batches alike, of whole prompts' worth, as many rows a worker."""
        each: int = self._minibatches * math.lcm(dp_size, self.config.actor_rollout_ref.rollout.n)
        return math.ceil(self._at_hand.rows / each) * each

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        actor = self.config.actor_rollout_ref.actor
        configured = actor.ppo_mini_batch_size
        actor.ppo_mini_batch_size = len(batch) // (self._minibatches * self.config.actor_rollout_ref.rollout.n)
        try:
            return super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size = configured

    # ------------------------------------------------------------- what it is worth

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        here, data = self._at_hand, transfer.get(batch, PASSED)
        old = dict(zip(batch.keys, data["old_log_probs"], strict=True))
        entropies = dict(zip(batch.keys, data["entropy"], strict=True))
        for _, answers in here.answers:
            for key, answer in answers.items():
                drawn = answer.logprobs if "rollout_log_probs" in data else old[key].float().numpy()
                answers[key] = replace(answer, logprobs=drawn, entropies=entropies[key].float().numpy())
        self.r3_step = self._algorithm.learn(self._groups(), version=self._version)
        self._recorder.took(self.r3_step, {}, **here.counts, epoch=self._epoch)
        self._r3_metrics = {**self.r3_step.counts, **here.counts, "rows": float(len(batch))}
        if here.joined and "rollout_log_probs" in data:
            # verl's own correction is for this step's rollouts: 1 for others
            keys = list(here.joined.values())
            drawn = torch.nested.as_nested_tensor([old[key] for key in keys], layout=torch.jagged)
            fields = TensorDict({"rollout_log_probs": drawn}, batch_size=len(keys))
            tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
        trained = sum(int(mask.sum()) for mask in data["response_mask"])
        token = _DECIDED.set(self._advantages(batch, old, trained))
        try:
            return super()._compute_advantage(batch, metrics)
        finally:
            _DECIDED.reset(token)

    def _advantages(self, batch: KVBatchMeta, old: dict[str, Tensor], tokens: int) -> list[Tensor]:
        """Row by row and token by token, at the scale of verl's loss; replayed tokens with their importance weights."""
        assert self.r3_step is not None
        here, objective = self._at_hand, self.r3_settings.objective
        fresh = [list(answers) for _, answers in here.answers]
        scale = scale_of(self.r3_settings, len(batch), tokens)
        decided, weights = {key: torch.zeros(len(old[key])) for key in batch.keys}, []
        for w in self.r3_step.weighted:
            extra = w.origin == "replayed" or w.other_context
            key = here.joined[w.group, w.member] if extra else fresh[w.group][w.member]
            importance_T = torch.ones(len(old[key]))
            if extra and not w.other_context:
                prox_BT, drew_BT = old[key].float()[None], torch.tensor(w.sample.logprobs)[None]
                by_sequence = objective.ratio == "sequence"
                ones_BT = torch.ones_like(prox_BT)
                importance_T = importance(prox_BT, drew_BT, ones_BT, objective, by_sequence=by_sequence)[0]
            if w.origin == "replayed":
                weights.append(importance_T)
            decided[key] = w.advantage * scale(w.weight, len(w.sample)) * importance_T
        if weights:
            self._r3_metrics |= importance_metrics(importance_sums(torch.cat(weights)))
        return [decided[key] for key in batch.keys]

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *more: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *more, **named)
        metrics.update({f"{KEY}/{name}": value for name, value in self._r3_metrics.items()})
        self._recorder.add(self.global_steps, told_of(metrics))
        self._recorder.flush()

    # ------------------------------------------------------------- the method, the buffer, checkpoints

    def _groups(self) -> list[Group]:
        answered = [(prompt, list(by_key.values())) for prompt, by_key in self._at_hand.answers]
        return to_groups(answered, version=self._version, step=self.global_steps)

    @property
    def _at_hand(self) -> _Batch:
        assert self._r3 is not None, "no batch was asked for yet"
        return self._r3

    @property
    def _epoch(self) -> int:
        return int((self.global_steps - 1) // self.steps_per_epoch + 1)

    @property
    def _recorder(self) -> RunRecorder:
        assert self._r3_recorder is not None, "it is opened with the buffer"
        return self._r3_recorder

    @property
    def _version(self) -> int:
        """Optimiser updates behind the policy that answers."""
        return int((self.global_steps - 1) * self._updates)

    @property
    def _algorithm(self) -> Algorithm:
        assert self._r3_algorithm is not None, "verl loads the checkpoint, and with it the buffer, before anything else"
        return self._r3_algorithm

    def _save_checkpoint(self) -> None:
        home = self.config.trainer.default_local_dir
        folder = os.path.join(home, f"global_step_{self.global_steps}")
        save_buffer(self._algorithm.buffer, folder)  # before verl calls it whole
        super()._save_checkpoint()
        prune_copies(home, "global_step_*", needs="actor")

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer, limits, checkpoint = self.config.trainer, self.r3_settings.buffer, None
        if self.global_steps > 0:
            checkpoint = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
            checkpoint = trainer.resume_from_path if trainer.resume_mode == "resume_path" else checkpoint
        path = limits.path or os.path.join(trainer.default_local_dir, FILE)
        buffer = open_buffer(path, checkpoint, per_query=limits.per_query, total=limits.total)
        tokenizer = Templated(self.tokenizer, self.config.data.get("apply_chat_template_kwargs") or {})
        self._r3_algorithm = Algorithm(self.r3_settings, buffer, tokenizer, seed=self.r3_settings.seed)
        run = described(self.config, self.r3_settings, total_steps=self.total_training_steps)
        after = None if checkpoint is None else self.global_steps
        self._r3_recorder = RunRecorder(trainer.default_local_dir, run, self.tokenizer, buffer, after=after)
