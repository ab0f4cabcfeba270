"""What R³ does in a step of verl's, whichever of verl's trainers it is in.

    asked = core.ask(…)          the batch's queries; reflection prompts that join it
    core.answered(…)             what came back, judged
    core.joining()               past samples that become rows of the batch, each with a key
    core.learn(…)                advantages, row by row and token by token, once verl has log-probs and entropies

A row's key is `{uid of its prompt}_{session}_0`. verl makes new uids at each draw; `Core` knows what they mean. How
rows are laid out is theirs: in TransferQueue (`v1.py`) or in a DataProto (`v0.py`).

Departures from the paper, and choices verl makes for us:
- Joined rows make a batch larger. The number of optimiser updates stays what `train_batch_size / ppo_mini_batch_size`
  says: mini-batches grow instead, filled up with empty rows.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from r3.algorithm import Algorithm, Prompt
from r3.integrations.common import (
    BUFFER_FILE,
    Answer,
    RunRecorder,
    importance,
    importance_metrics,
    importance_sums,
    open_buffer,
    prune_copies,
    save_buffer,
    scale_of,
    to_groups,
    turns_of,
)
from r3.integrations.verl import KEY, REWARD
from r3.integrations.verl.config import VerlSettings, described
from r3.integrations.verl.data import Templated, query_of
from r3.method.mixed import StepResult, training_prompts
from r3.samples import FloatArray, Group, IntArray, Sample

MEASURED = {
    "actor/pg_loss": "update/loss",
    "actor/grad_norm": "update/grad_norm",
    "actor/lr": "update/learning_rate",
    "actor/entropy": "update/entropy",
}
"""verl's names of what r3's own loop measures too."""
PART = "reward_"
"""What the reward manager puts before the name of each part of a reward."""
NO_ROUTES = (
    "a replayed row has no expert routes and no images: turn router_replay off, use a text model, or set "
    f"++{KEY}.name=r3-no-replay"
)


@dataclass(frozen=True, slots=True)
class Reflection:
    """A reflection prompt that joins the batch."""

    position: int
    """Its query's row among those that were asked."""
    uid: str
    turns: str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Joining:
    """A sequence that joins the batch: a past sample under its group's prompt, or a fresh one under the plain one."""

    key: str
    like: str
    """Key of a row of its group, for all that a group's rows have in common."""
    prompt: IntArray
    sample: Sample


@dataclass(frozen=True, slots=True)
class Passed:
    """What verl's pass over a row gave, token by token of the response."""

    old_logprobs: Tensor
    entropies: Tensor


@dataclass
class Batch:
    """A step's batch on its way through verl's stages."""

    step: int
    epoch: int
    prompts: dict[str, Prompt]
    """By verl's uid."""
    counts: dict[str, float]
    answers: list[tuple[Prompt, dict[str, Answer]]] = field(default_factory=list)
    """By the row's key; those whose rollouts failed are left out."""
    joined: dict[tuple[int, int], str] = field(default_factory=dict)
    """Keys of the rows that joined, by group and member."""


def key_of(uid: str, session: int) -> str:
    return f"{uid}_{session}_0"


def uid_of(key: str) -> str:
    return key.rsplit("_", 2)[0]


def answer_of(prompt: IntArray, tokens: IntArray, drawn: FloatArray | None, told: Mapping[str, Any]) -> Answer:
    """A row as an answer, without entropies; `told` is what the reward manager said of it."""
    parts = {name.removeprefix(PART): float(told[name]) for name in told if name.startswith(PART)}
    if missing := {"acc", "truncated"} - set(told) | ({PART + "correct"} if "correct" not in parts else set()):
        raise ValueError(
            f"an answer came without {', '.join(sorted(missing))}: set reward.reward_manager.name={REWARD}"
        )
    # Log-probs are filled in once the actor has made them, where the rollout engine was not asked for its own.
    logprobs = np.zeros(len(tokens), np.float32) if drawn is None else drawn
    return Answer(prompt, tokens, logprobs, None, bool(told["truncated"]), bool(told["acc"]), parts)


def session_of(key: str) -> int:
    return int(key.rsplit("_", 2)[1])


class Core:
    """The method inside one of verl's trainers: its batch at hand, its buffer, its record."""

    def __init__(self, config: DictConfig, settings: VerlSettings) -> None:
        self.config = config
        self.settings = settings
        self.result: StepResult | None = None
        """The last batch's mixed groups and advantages."""
        actor = config.actor_rollout_ref.actor
        self.group_size = int(config.actor_rollout_ref.rollout.n)
        self.minibatches = config.data.train_batch_size // actor.ppo_mini_batch_size
        self._updates = self.minibatches * actor.ppo_epochs
        self._batch: Batch | None = None
        self._metrics: dict[str, float] = {}
        self._opened: tuple[Algorithm, RunRecorder, int] | None = None

    # ------------------------------------------------------------- the buffer and the record

    def open(self, tokenizer: Any, *, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Open the buffer and the record, as they were at the checkpoint of `step`; 0 for a new run."""
        trainer, settings = self.config.trainer, self.settings
        limits, home, checkpoint = settings.buffer, trainer.default_local_dir, None
        if step > 0:
            checkpoint = os.path.join(home, f"global_step_{step}")
            checkpoint = trainer.resume_from_path if trainer.resume_mode == "resume_path" else checkpoint
        path = limits.path or os.path.join(home, BUFFER_FILE)
        buffer = open_buffer(path, checkpoint, per_query=limits.per_query, total=limits.total)
        templated = Templated(tokenizer, self.config.data.get("apply_chat_template_kwargs") or {})
        algorithm = Algorithm(settings, buffer, templated, seed=settings.seed)
        run = described(self.config, settings, total_steps=total_steps)
        recorder = RunRecorder(home, run, tokenizer, buffer, after=step or None)
        self._opened = algorithm, recorder, steps_per_epoch

    def save(self, step: int) -> None:
        """A copy of the buffer, before verl calls the checkpoint whole."""
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{step}")
        save_buffer(self.algorithm.buffer, folder)

    def prune(self) -> None:
        """Remove the copies of checkpoints that verl thinned out."""
        prune_copies(self.config.trainer.default_local_dir, "global_step_*", needs="actor")

    def close(self) -> None:
        if self._opened is None:
            return
        try:
            self.recorder.close()
        finally:
            self.algorithm.buffer.close()

    @property
    def algorithm(self) -> Algorithm:
        assert self._opened is not None, "verl loads the checkpoint, and with it the buffer, before anything else"
        return self._opened[0]

    @property
    def recorder(self) -> RunRecorder:
        assert self._opened is not None, "it is opened with the buffer"
        return self._opened[1]

    @property
    def batch(self) -> Batch:
        assert self._batch is not None, "no batch was asked for yet"
        return self._batch

    # ------------------------------------------------------------- what is asked, and what came back

    def ask(
        self, step: int, prompts: Sequence[Any], indices: Sequence[Any], uids: Sequence[str], *, multiple_of: int = 1
    ) -> list[Reflection]:
        """Note the step's batch; the reflection prompts that are to join it, in a multiple if verl wants one."""
        assert self._opened is not None
        epoch, settings = (step - 1) // self._opened[2] + 1, self.settings
        rows = zip(prompts, indices, strict=True)
        queries = [(query_of(prompt, index, settings.query_key), epoch) for prompt, index in rows]
        asked = self.algorithm.ask(queries, step=step).limited(settings.max_reflections, multiple_of=multiple_of)
        self.recorder.begin(step)
        counts = {f"reflection/{name}": float(n) for name, n in asked.counts.items()}
        new = [str(uuid.uuid4()) for _ in asked.reflections]
        self._batch = Batch(step, epoch, dict(zip([*uids, *new], asked.prompts, strict=True)), counts)
        pairs = zip(asked.reflections, new, strict=True)
        return [Reflection(prompt.position, uid, turns_of(prompt.text)) for prompt, uid in pairs]

    def answered(self, answers: Mapping[str, dict[str, Answer]]) -> None:
        """The judged answers by the uid of their prompt and then by key, in the order of sessions."""
        here = self.batch
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

    # ------------------------------------------------------------- what joins, and how large a batch becomes

    def joining(self) -> list[Joining]:
        """Past samples under their group's prompt; reflection answers under the plain one, where settings say so."""
        here, joining = self.batch, []
        preview = self.algorithm.preview(self._groups(), version=self._version)  # entropies come later
        for number, (mixed, (_, answers)) in enumerate(zip(preview.groups, here.answers, strict=True)):
            like = next(iter(answers))
            for index, member in enumerate(mixed.members):
                for prompt, other_context in training_prompts(mixed.group, member, self.settings):
                    if member.origin == "replayed" or other_context:
                        key = key_of(uid_of(like), self.group_size + index)
                        here.joined[number, index] = key
                        joining.append(Joining(key, like, prompt, member.sample))
        return joining

    def in_order(self, keys: Sequence[str]) -> list[int]:
        """The rows as they were asked, by prompt and session; verl has them as they came, and cuts mini-batches so."""
        places = {uid: place for place, uid in enumerate(self.batch.prompts)}
        return sorted(range(len(keys)), key=lambda row: (places[uid_of(keys[row])], session_of(keys[row])))

    def filled_up(self, rows: int, workers: int) -> int:
        """How many rows that many become: mini-batches alike, of whole prompts' worth, as many rows a worker.

        Where verl is to cut a worker's rows into micro-batches of one size, they are of that size.
        """
        config = self.config.actor_rollout_ref
        passes, updates = [1], 1
        if not config.actor.use_dynamic_bsz:
            updates = config.actor.ppo_micro_batch_size_per_gpu or 1
            passes.append(config.rollout.log_prob_micro_batch_size_per_gpu or 1)
        if config.actor.use_kl_loss and not config.ref.log_prob_use_dynamic_bsz:
            passes.append(config.ref.log_prob_micro_batch_size_per_gpu or 1)
        each = self.minibatches * math.lcm(workers * updates, self.group_size)
        each = math.lcm(each, *(workers * size for size in passes))
        return int(math.ceil(rows / each) * each)

    def minibatch(self, rows: int) -> int:
        """verl's `ppo_mini_batch_size`, in prompts, by which the number of mini-batches stays for so many rows."""
        return int(rows // (self.minibatches * self.group_size))

    @contextmanager
    def grown_minibatches(self, rows: int) -> Iterator[None]:
        """verl's `ppo_mini_batch_size` as it has to be for a batch of so many rows."""
        actor = self.config.actor_rollout_ref.actor
        configured, actor.ppo_mini_batch_size = actor.ppo_mini_batch_size, self.minibatch(rows)
        try:
            yield
        finally:
            actor.ppo_mini_batch_size = configured

    # ------------------------------------------------------------- what it is worth

    def learn(self, passed: Mapping[str, Passed], *, tokens: int, drawn_known: bool) -> dict[str, Tensor]:
        """Advantages by key, token by token: all rows of the batch, of which `tokens` tokens are trained on.

        `drawn_known`: the rollout engine gave log-probs of its own; those of the step's start are kept otherwise.
        """
        here = self.batch
        for _, answers in here.answers:
            for key, answer in answers.items():
                drawn = answer.logprobs if drawn_known else passed[key].old_logprobs.float().numpy()
                answers[key] = replace(answer, logprobs=drawn, entropies=passed[key].entropies.float().numpy())
        self.result = self.algorithm.learn(self._groups(), version=self._version)
        self.recorder.took(self.result, {}, **here.counts, epoch=here.epoch)
        self._metrics = {**self.result.counts, **here.counts, "rows": float(len(passed))}
        return self._advantages(passed, tokens)

    def _advantages(self, passed: Mapping[str, Passed], tokens: int) -> dict[str, Tensor]:
        """At the scale of verl's loss; replayed tokens with their importance weights."""
        assert self.result is not None
        here, objective = self.batch, self.settings.objective
        fresh = [list(answers) for _, answers in here.answers]
        scale = scale_of(self.settings, len(passed), tokens)
        decided, weights = {key: torch.zeros(len(row.old_logprobs)) for key, row in passed.items()}, []
        for w in self.result.weighted:
            extra = w.origin == "replayed" or w.other_context
            key = here.joined[w.group, w.member] if extra else fresh[w.group][w.member]
            importance_T = torch.ones(len(decided[key]))
            if extra and not w.other_context:
                prox_BT = passed[key].old_logprobs.float()[None]
                drew_BT, ones_BT = torch.tensor(w.sample.logprobs)[None], torch.ones_like(prox_BT)
                by_sequence = objective.ratio == "sequence"
                importance_T = importance(prox_BT, drew_BT, ones_BT, objective, by_sequence=by_sequence)[0]
            if w.origin == "replayed":
                weights.append(importance_T)
            decided[key] = w.advantage * scale(w.weight, len(w.sample)) * importance_T
        if weights:
            self._metrics |= importance_metrics(importance_sums(torch.cat(weights)))
        return decided

    def record(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Write the step's line, with what verl measured of it; the method's metrics, under the names verl logs."""
        measured = {ours: float(np.mean(metrics[theirs])) for theirs, ours in MEASURED.items() if theirs in metrics}
        self.recorder.add(self.batch.step, measured)
        self.recorder.flush()
        return {f"{KEY}/{name}": value for name, value in self._metrics.items()}

    def _groups(self) -> list[Group]:
        answered = [(prompt, list(by_key.values())) for prompt, by_key in self.batch.answers]
        return to_groups(answered, version=self._version, step=self.batch.step)

    @property
    def _version(self) -> int:
        """Optimiser updates behind the policy that answers."""
        return int((self.batch.step - 1) * self._updates)


class WithCore:
    """What both trainers do around verl's checkpoints and at the end; a base that comes before verl's class."""

    r3: Core

    def fit(self, *more: Any) -> None:
        try:
            super().fit(*more)  # type: ignore[misc]
        finally:
            self.r3.close()

    def _save_checkpoint(self: Any) -> None:
        self.r3.save(self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]
        self.r3.prune()

    def _load_checkpoint(self: Any) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        self.r3.open(
            self.tokenizer,
            step=self.global_steps,
            total_steps=self.total_training_steps,
            steps_per_epoch=self.steps_per_epoch,
        )
