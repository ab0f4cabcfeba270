"""`R3Trainer`: TRL's `GRPOTrainer` with R³'s replay, reflection and ranking rewards.

Six overrides, each around `super()`. Before TRL generates, reflection prompts join its rows; after TRL has judged
them, further queries may be asked for groups without variance (DAPO's resampling), `r3.algorithm` decides the
advantages, and rows of replayed samples join; TRL's own loss does the rest.

Departures from the paper, and choices TRL makes for us:
- Reflection groups are appended to the generation batch, in whole groups that divide over the processes.
- A replayed sample takes the place of a row without gradient (advantage 0), on any rank; where those do not suffice,
  all ranks get the same number of further rows. No member of a mixed group is dropped: Eq. 3 and the loss see all of
  G ∪ G_C.
- Rows of advantage 0 that gave way are not trained on; with `beta` > 0 TRL would have trained on their KL alone.
- TRL's losses count rows, the method counts groups and their members: advantages are scaled by the ratio of the two.
- Staleness: replayed tokens' truncated importance weights are folded into a per-token advantage, since TRL's clip is
  around the current policy. The literal ratio π/π_behave of the paper (`correction: naive`) is not offered here.
- TRL's log-probs are those of temperature sampling; top-k, top-p, min-p and penalties are not in them.
- Right or wrong is a threshold on one reward function. A truncated answer is wrong and has at most 0 of that reward.
- Queries that resampling asks for come from an order of their own beside TRL's sampler, whose steps are counted before
  the run (`FurtherRows`).
- With every mechanism off this is TRL's trainer, its advantages included.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from r3.algorithm import Algorithm
from r3.integrations import common
from r3.integrations.trl import grpo, layout
from r3.integrations.trl.config import R3Config, changes_training
from r3.integrations.trl.grpo import FurtherRows, RankedTrainer, Row, Seen, Step, described, told_of
from r3.method.mixed import StepResult
from r3.samples import Query


class R3Trainer(RankedTrainer):
    """`GRPOTrainer` that learns from homogeneous groups too. Same constructor; `args` is an `R3Config`."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: R3Config | None = None, *others: Any, **named: Any
    ) -> None:
        args = R3Config() if args is None else args
        if not isinstance(args, R3Config):
            raise TypeError(f"R3Trainer takes an R3Config, not a {type(args).__name__}: change its name in your script")
        super().__init__(model, reward_funcs, args, *others, **named)
        self.r3_settings = args.method()
        self.r3_step: StepResult | None = None
        """The last batch's mixed groups and advantages; on the main process."""
        self._multiple_of = args.pad_to_multiple_of if isinstance(args.pad_to_multiple_of, int) else None
        self._r3_on = changes_training(self.r3_settings)
        self._group_size = int(args.num_generations or 0)
        self._microbatches = int(args.steps_per_generation or 0)
        self._r3_algorithm: Algorithm | None = None
        self._r3_recorder: common.RunRecorder | None = None
        """Writes what r3 view reads; on the main process, as the algorithm."""
        self._r3_under_way: Step | None = None
        self._r3_further: FurtherRows | None = None
        self._r3_seen: Seen | None = None
        self._r3_sampler: Any = None
        self._r3_outcome = grpo.outcome_index(args.r3_outcome_reward, self.reward_func_names) if self._r3_on else 0
        self._r3_watch = grpo.outcome_watch(self.reward_func_names[self._r3_outcome], args.r3_right_above)
        if self._r3_on and isinstance(self.train_dataset, Sized):
            grpo.check_rows(self.train_dataset, args.r3_id_column)  # type: ignore[arg-type]  # rows, as TRL wants them
        if self.r3_settings.resample.enabled:
            self._r3_further = FurtherRows(self.train_dataset, seed=args.seed, shuffle=bool(self.shuffle_dataset))
        args.check_context(self._vllm_context)
        self.add_callback(_Callbacks(self))

    # ------------------------------------------------------------- overrides

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        if not (self._r3_on and self.model is not None and self.model.training):
            return super()._generate_and_score_completions(inputs)
        drawn = [self._drawn(self._with_reflections(inputs))]
        for _ in range(self.r3_settings.resample.max_rounds):
            if not (rows := self._further_rows()):
                break
            drawn.append(self._drawn(rows))
        plan = self._on_main(self._decide)
        self._log_plan(plan)
        if self._r3_further is not None:
            self._metrics["train"]["r3/resample/rounds"].append(len(drawn) - 1)
        ranks = self.accelerator.num_processes
        order = grpo.by_rank([len(batch["prompt_ids"]) * ranks for batch in drawn], ranks)
        return self._trained_rows(layout.join(drawn), plan, order)

    def _drawn(self, inputs: list[Row]) -> layout.Batch:
        """TRL's batch of answers to these rows; the groups that they form join the step's."""
        self._r3_seen = Seen()
        try:
            batch = super()._generate_and_score_completions(inputs)
            seen = self._r3_seen
        finally:
            self._r3_seen = None
        layout.check(batch)
        answers = gather_object(self._answers(batch, seen))
        self._on_main(lambda: self._grouped(answers))
        return batch

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._r3_seen is not None:
            self._r3_seen.rewards, self._r3_seen.completion_ids = rewards, completion_ids_list
        return rewards

    def _get_per_token_logps_and_entropies(self, model: Any, *inputs: Any, **options: Any) -> Any:
        if self._r3_seen is None or model is not self.model:
            return super()._get_per_token_logps_and_entropies(model, *inputs, **options)
        logps, entropies, aux = super()._get_per_token_logps_and_entropies(
            model, *inputs, **{**options, "compute_entropy": True}
        )
        self._r3_seen.passes.append((logps, entropies))
        return logps, entropies, aux

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._r3_algorithm is not None:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            common.save_buffer(self._r3_algorithm.buffer, folder)  # first: no checkpoint looks complete without it
            if self._r3_further is not None:
                self._r3_further.save(folder)
            self._recorder.flush()
        super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
        if not self._r3_on or checkpoint is None:
            return
        self._on_main(lambda: self._open_buffer(checkpoint))
        if self._r3_further is not None:
            self._r3_further.position = self._on_main(lambda: grpo.saved_position(checkpoint))
        # TRL's sampler draws a new order at each pass, and starts over when resumed: pass by the orders already used.
        for _ in range(self._epoch() - 1 if self._r3_sampler is not None else 0):
            next(iter(self._r3_sampler), None)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._r3_sampler = super()._get_train_sampler(dataset)
        return self._r3_sampler

    # ------------------------------------------------------------- before generation

    def _with_reflections(self, inputs: list[Row]) -> list[Row]:
        """This rank's rows, with the reflection prompts of hard queries among them."""
        everyone: list[Row] = gather_object(inputs)
        size, epoch = self._group_size, self._epoch()
        batch = [(grpo.query_of(row, self.args.r3_id_column), epoch) for row in everyone[::size]]
        reflections = self._on_main(lambda: self._ask(batch))
        for position, prompt in reflections:
            everyone += [{**everyone[position * size + i], "prompt": prompt} for i in range(size)]
        # TRL's groups lie side by side across the ranks, so all rows are dealt anew when there are more of them.
        return self._share(everyone) if reflections else inputs

    @property
    def _whole(self) -> int:
        """Groups come in multiples of this, so that their rows divide over the ranks."""
        return int(self.accelerator.num_processes) // math.gcd(self._group_size, self.accelerator.num_processes)

    def _ask(self, batch: list[tuple[Query, int]]) -> list[tuple[int, Any]]:
        """Reflection prompts in TRL's form, each with its query's position; as many as the ranks can share."""
        asked = self._algorithm.ask(batch, step=self.state.global_step + 1)
        self._recorder.begin(self.state.global_step + 1)
        asked = asked.limited(self.args.r3_max_reflections, multiple_of=self._whole)
        self._r3_under_way = Step(len(batch), asked.prompts, asked.counts)
        for name in ("built", "early", "not_hard", "never_tried", "given_up", "no_failure", "too_long", "no_room"):
            self._metrics["train"][f"r3/reflection/{name}"].append(asked.counts.get(name, 0))
        return [(prompt.position, common.turns_of(prompt.text)) for prompt in asked.reflections]

    def _further_rows(self) -> list[Row]:
        """This rank's part of rows with other queries, for groups without variance; none where all have some (DAPO)."""
        if self._r3_further is None:
            return []
        missing = self._on_main(
            lambda: self._algorithm.missing(self._step_under_way.groups, self._step_under_way.queries)
        )
        rows = self._r3_further.take(math.ceil(missing / self._whole) * self._whole)
        batch = [(grpo.query_of(row, self.args.r3_id_column), self._epoch()) for row in rows]
        if self.accelerator.is_main_process:
            self._step_under_way.prompts = self._algorithm.plain_prompts(batch)
        return self._share([dict(row) for row in rows for _ in range(self._group_size)])

    # ------------------------------------------------------------- after generation

    def _answers(self, batch: layout.Batch, seen: Seen) -> list[common.Answer]:
        """This rank's rows as plain values: what was drawn, how likely it was, how it was judged."""
        assert seen.rewards is not None
        logps_BC, entropies_BC = self._statistics(batch, seen)
        if (drawn := batch.get("sampling_per_token_logps")) is not None:  # vLLM's own, NaN where it could not tell
            logps_BC = torch.where(torch.isnan(drawn), logps_BC, drawn)
        first = self.accelerator.process_index * len(seen.completion_ids)
        rewards = (seen.rewards * self.reward_weights.to(seen.rewards.device)).double().cpu().numpy()
        verdicts = seen.rewards[:, self._r3_outcome].tolist()
        if any(map(math.isnan, verdicts)):  # those of all ranks, so that all stop
            raise ValueError(
                f"reward function {self.reward_func_names[self._r3_outcome]!r} returned None for an answer, and R³ "
                "needs each judged right or wrong: name one that judges all in r3_outcome_reward"
            )
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        prompts = [
            ids[mask.bool()].cpu().numpy() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        logps, entropies = logps_BC.float().cpu().numpy(), entropies_BC.float().cpu().numpy()
        answers = []
        for i, tokens in enumerate(seen.completion_ids):
            n, truncated = len(tokens), tokens[-1] not in ends
            parts, right = self._judged(rewards[first + i], verdicts[first + i], truncated)
            ids = np.asarray(tokens, dtype=np.int32)
            answers.append(common.Answer(prompts[i], ids, logps[i, :n], entropies[i, :n], truncated, right, parts))
        return answers

    def _statistics(self, batch: layout.Batch, seen: Seen) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the generated rows: from TRL's own pass if it made one, else from one of ours."""
        old = batch.get("old_per_token_logps")
        for logps_BC, entropies_BC in seen.passes:
            if logps_BC is old and not self.mask_truncated_completions:
                return logps_BC, entropies_BC
        lengths = torch.tensor([len(ids) for ids in seen.completion_ids], device=batch["completion_ids"].device)
        # Not TRL's completion mask: it hides truncated answers where those are masked, and the buffer wants them.
        mask_BC = torch.arange(batch["completion_ids"].size(1), device=lengths.device) < lengths[:, None]
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], mask_BC.long()], dim=1)
        return self._forward(self.model, input_ids, attention, mask_BC.size(1))

    def _judged(self, rewards: Any, verdict: float, truncated: bool) -> tuple[dict[str, float], bool]:
        parts = {n: 0.0 if math.isnan(r) else float(r) for n, r in zip(self.reward_func_names, rewards, strict=True)}
        if truncated:  # no more than 0: with rewards of ±1 a cut answer must not outrank a wrong one
            outcome = self.reward_func_names[self._r3_outcome]
            parts[outcome] = min(0.0, parts[outcome])
        return parts, verdict > self.args.r3_right_above and not truncated

    def _grouped(self, answers: Sequence[common.Answer]) -> None:
        """The answers join the step as the groups of the prompts that were asked."""
        step, size = self._step_under_way, self._group_size  # TRL lays a prompt's answers side by side
        answered = [(prompt, answers[g * size : (g + 1) * size]) for g, prompt in enumerate(step.prompts)]
        step.answers += answers
        step.groups += common.to_groups(answered, version=self.state.global_step, step=self.state.global_step + 1)

    def _decide(self) -> layout.Plan:
        """Algorithm 1 from verified groups to advantages, and S ← S ∪ D_b's responses."""
        step, outcome = self._step_under_way, self.reward_func_names[self._r3_outcome]
        if warning := self._r3_watch.see(
            [answer.rewards[outcome] for answer in step.answers],
            [math.fsum(answer.rewards.values()) for answer in step.answers],
            [answer.right for answer in step.answers],
        ):
            warnings.warn(warning, stacklevel=2)
        self.r3_step = self._algorithm.learn(step.groups, version=self.state.global_step)
        self._recorder.took(self.r3_step, step.counts, epoch=self._epoch())
        return layout.plan_rows(self.r3_step, self.r3_settings)

    def _trained_rows(self, batch: layout.Batch, plan: layout.Plan, order: Sequence[int]) -> layout.Batch:
        """TRL's batch with the plan's advantages and its extra rows; `order` says which of the plan's each row is."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        laid = layout.lay_out(
            (plan.advantages[list(order)] != 0).tolist(),
            ranks,
            len(plan.extra),
            at_least=self.args.per_device_train_batch_size * self._microbatches,
            multiple=self._microbatches,
        )
        mine = laid[rank]
        # As many extra rows on every rank go through the model: sharded models make the ranks run in step.
        stand_ins = max(len(rank_rows.extra) for rank_rows in laid) - len(mine.extra)
        extra = [plan.extra[i] for i in (*mine.extra, *[0] * stand_ins)]
        padded = layout.pad_rows(extra, batch, self._tokenizer.pad_token_id, self._multiple_of)
        values, weight_BC = self._extra_values(batch, padded, len(mine.extra))
        out = layout.select(batch, mine.kept, padded[: len(mine.extra)], values, mine.empty)
        first = rank * (len(order) // ranks)
        generated = [order[first + i] for i in mine.kept]
        out["advantages"] = self._advantages(plan, generated, mine, len(mine) * ranks, weight_BC)
        out["num_items_in_batch"] = torch.full_like(batch["num_items_in_batch"], plan.tokens)
        self._metrics["train"]["r3/rows"].append(len(mine) * ranks)
        self._metrics["train"]["r3/rows/empty"].append(sum(rank_rows.empty for rank_rows in laid))
        return out

    def _advantages(
        self, plan: layout.Plan, generated: Sequence[int], mine: layout.RankRows, total: int, weight_BC: Tensor
    ) -> Tensor:
        """Eq. 3's advantages at the scale of TRL's loss; by token where replayed rows carry importance weights."""
        scale = common.scale_of(self.r3_settings, total, plan.tokens)
        kept = [plan.advantages[i] * scale(plan.weights[i], plan.lengths[i]) for i in generated]
        extra = [plan.extra[i] for i in mine.extra]
        joined = [row.advantage * scale(row.weight, len(row.tokens)) for row in extra]
        flat_B = torch.tensor([*kept, *joined, *[0.0] * mine.empty], dtype=torch.float32, device=weight_BC.device)
        if not plan.extra:
            return flat_B
        weights_BC = torch.ones((len(flat_B), weight_BC.size(1)), device=flat_B.device)
        weights_BC[len(kept) : len(kept) + len(joined)] = weight_BC
        return flat_B[:, None] * weights_BC

    # ------------------------------------------------------------- the model on extra rows

    def _extra_values(self, batch: layout.Batch, extra: layout.Padded, n: int) -> tuple[layout.Batch, Tensor]:
        """What TRL's loss needs of the first `n` extra rows (the others are stand-ins), and their weights."""
        wide = extra.completion_ids_BC.size(1)
        if len(extra) == 0:
            nothing = torch.zeros((0, wide), device=self.accelerator.device)
            return dict.fromkeys(layout.COMPLETION, nothing), nothing
        proximal_BC = self._forward(self.model, extra.input_ids, extra.attention_mask, wide)[0][:n].float()
        reference_BC = proximal_BC
        if "ref_per_token_logps" in batch:
            reference_BC = self._reference(extra.input_ids, extra.attention_mask, wide)[:n].float()
        mine, by_sequence = extra[:n], self.importance_sampling_level == "sequence"
        weight_BC = layout.importance(proximal_BC, mine, self.r3_settings.objective, by_sequence=by_sequence)
        self._log_importance(weight_BC[mine.completion_mask_BC.bool()])
        values = {
            "old_per_token_logps": proximal_BC,
            "ref_per_token_logps": reference_BC,
            "sampling_per_token_logps": torch.where(mine.moved_B[:, None], proximal_BC, mine.behaviour_BC),
            "importance_sampling_ratio": torch.ones_like(proximal_BC),
        }
        return values, weight_BC

    # ------------------------------------------------------------- the buffer, the ranks, the metrics

    @property
    def _step_under_way(self) -> Step:
        assert self._r3_under_way is not None
        return self._r3_under_way

    @property
    def _algorithm(self) -> Algorithm:
        if self._r3_algorithm is None:
            self._open_buffer(None)
        assert self._r3_algorithm is not None
        return self._r3_algorithm

    def _open_buffer(self, checkpoint: str | None) -> None:
        self.close_buffer()
        path = self.args.r3_buffer_path or os.path.join(str(self.args.output_dir), common.BUFFER_FILE)
        limits = {"per_query": self.args.r3_buffer_per_query, "total": self.args.r3_buffer_total}
        buffer = common.open_buffer(path, checkpoint, **limits)
        self._r3_algorithm = Algorithm(self.r3_settings, buffer, self._tokenizer, seed=self.args.seed)
        run = described(self.args, self.r3_settings, self.model, total_steps=self.state.max_steps)
        after = None if checkpoint is None else self.state.global_step
        self._r3_recorder = common.RunRecorder(str(self.args.output_dir), run, self._tokenizer, buffer, after=after)

    @property
    def _recorder(self) -> common.RunRecorder:
        assert self._r3_recorder is not None, "it is opened with the buffer"
        return self._r3_recorder

    def tell(self, logs: dict[str, Any]) -> None:
        """What TRL logged of the step that just ended, for the run's record."""
        if self._r3_recorder is not None:
            self._r3_recorder.add(self.state.global_step, told_of(logs))

    def close_buffer(self) -> None:
        """Close the buffer's file and the run's record; `train` does this at its end."""
        if self._r3_recorder is not None:
            self._r3_recorder.close()
            self._r3_recorder = None
        if self._r3_algorithm is not None:
            self._r3_algorithm.buffer.close()
            self._r3_algorithm = None

    def _log_plan(self, plan: layout.Plan) -> None:
        for name, value in plan.counts.items():
            self._metrics["train"][f"r3/{name}"].append(value)
        logged: Any = self._logs["advantages"]  # TRL's table of completions shows what was trained with
        for _ in range(min(len(logged), len(plan.advantages))):
            logged.pop()
        logged.extend(plan.advantages.tolist())

    def _log_importance(self, weight_T: Tensor) -> None:
        sums = self.accelerator.gather(common.importance_sums(weight_T)[None]).sum(0)
        for name, value in common.importance_metrics(sums).items():
            self._metrics["train"][f"r3/{name}"].append(value)


class _Callbacks(TrainerCallback):
    """Closes the buffer's file when training ends, so that another run can open it; passes on what TRL logs."""

    def __init__(self, trainer: R3Trainer) -> None:
        self.trainer = trainer

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self.trainer.tell(logs or {})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.close_buffer()
