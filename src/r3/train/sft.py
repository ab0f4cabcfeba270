"""`r3 sft`: a short supervised warm start on written solutions, before reinforcement has anything to reinforce.

The loss is the mean negative log-likelihood of a batch's response tokens. Policy, packing and optimiser are those of
`r3 train`, and so are the settings: `train.queries_per_step` is the batch in sequences, `rollout.max_tokens` the
longest solution that is learnt from. A solution is the task's column `solution` followed by the boxed answer.

A model that has only seen questions cannot do anything with a failed attempt in its prompt. With `task.retries_from` it
learns that too, from its own failures: a run of `r3 train` on the same problems, whose wrong answers are shown in the
reflection prompt of `method.reflection`, each followed by the written solution.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3.buffer import SampleBuffer
from r3.config import Config, dump
from r3.errors import ConfigError
from r3.method.reflection import ReflectionPrompt, plain_prompt, reflect
from r3.policy.attention import packed
from r3.policy.machine import set_threads
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory, pack
from r3.policy.update import Diverged
from r3.run import Progress, RunDirectory, RunFiles, StopRequested
from r3.run.disk import temporary
from r3.samples import IntArray, Query
from r3.tasks import load_problems
from r3.tasks.task import written
from r3.train.build import check_task, check_template
from r3.train.session import run_path

log = logging.getLogger(__name__)
KIND = "sft"
"""Marks a warm start's directory in run.json: unlike that of an `r3 train`, it may be started again."""
SHOWN = {"loss": "loss", "held-out loss": "heldout/loss", "grad norm": "grad_norm", "rate": "learning_rate"}


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a warm start ended."""

    model: Path
    """The folder that `model.path` takes."""
    examples: int
    retries: int
    """How many of the examples show a failed attempt."""
    too_long: int
    losses: tuple[float, float]
    """Held-out loss per token, before and after; NaN if nothing was held out."""
    stopped_by: str | None


def warm_start(config: Config) -> WarmStart:
    """Train on the task's written solutions and write a Hugging Face folder, whole or not at all."""
    directory_path = run_path(config)
    model_path = directory_path / "model"
    if model_path.exists():
        raise ConfigError(
            f"{directory_path} holds a finished warm start; use it (model.path={model_path}) or choose another run.dir"
        )
    if config.model.lora.enabled:
        raise ConfigError(
            "r3 sft trains whole models: set model.lora.enabled=false (r3 train can add adapters to its model)"
        )
    set_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    policy = Policy.load(config.model)
    examples, heldout, retries, too_long = _examples(config, policy)
    with _directory(directory_path, config) as directory:
        directory.rewind(-1)  # a warm start that was killed is begun again: it takes minutes
        losses, stopped = _Lessons(config, policy, examples, heldout, directory).run()
        if stopped is None:
            prepared = temporary(model_path)
            policy.save(prepared)
            prepared.rename(model_path)
    return WarmStart(model_path, len(examples), retries, too_long, losses, stopped)


def _directory(path: Path, config: Config) -> RunDirectory:
    """A new run directory, or that of a warm start with the same settings that was cut off."""
    files = RunFiles(path)
    if files.info_path.exists():
        if files.read_info().get("kind") != KIND or files.read_config() != dump(config):
            raise ConfigError(f"{path}: holds another run, or one with other settings; choose another run.dir")
        return RunDirectory.open(path)
    directory = RunDirectory.create(path, dump(config), seed=config.run.seed)
    directory.update_info(kind=KIND)
    return directory


def _examples(config: Config, policy: Policy) -> tuple[list[Trajectory], list[Trajectory], int, int]:
    """Training and held-out examples that fit rollout.max_tokens; how many show a failure, and how many did not fit."""
    task = load_problems(config.task, config.run.seed)
    try:
        check_task(task)
        check_template(config, any(not isinstance(query.prompt, str) for query in task.train), policy.tokenizer)
        if not policy.stop_tokens:
            raise ConfigError(
                f"model.path={config.model.path}: its tokenizer names no end-of-text token; set eos_token"
            )
        made = [example(query, policy) for query in task.train]
        room, longest = policy.max_context or math.inf, config.rollout.max_tokens

        def fitting(some: Sequence[Trajectory | None]) -> list[Trajectory]:
            kept = (solution for solution in some if solution is not None and len(solution) <= room)
            return [solution for solution in kept if len(solution.response) <= longest]

        plain, retries = fitting(made), fitting(_retries(config, task.train, policy))
        if not any(made):
            raise ConfigError(
                f"task {task.name!r} has no written solutions: its rows need a column 'solution' (or 'response')"
            )
        if not plain:
            raise ConfigError(
                f"no solution has at most rollout.max_tokens={config.rollout.max_tokens} tokens; raise it"
            )
        heldout = [solved for query in task.heldout if (solved := example(query, policy)) is not None]
    finally:
        task.judge.close()
    return plain + retries, heldout, len(retries), sum(solution is not None for solution in made) - len(plain)


def _retries(config: Config, queries: Sequence[Query], policy: Policy) -> list[Trajectory | None]:
    """For each query that the run `task.retries_from` answered wrongly: the prompt that shows it, and the solution."""
    if config.task.retries_from is None:
        return []
    run, settings, rng = RunFiles(config.task.retries_from), config.method.reflection, np.random.default_rng(0)
    run.read_info()  # refuses a folder that is no run
    with SampleBuffer.open_reader(run.buffer_path) as buffer:
        wrong = buffer.history(
            [query.id for query in queries], outcome=False, limit=settings.candidates, context="plain"
        )
    reflections = [reflect(query, wrong[query.id], policy.tokenizer, settings, rng=rng) for query in queries]
    if not any(isinstance(made, ReflectionPrompt) for made in reflections):
        raise ConfigError(
            f"task.retries_from={run.path} holds no wrong answer to these problems; it must be a run of r3 train on "
            "the same task (name, split, size, rows)"
        )
    return [
        example(query, policy, made.tokens)
        for query, made in zip(queries, reflections, strict=True)
        if isinstance(made, ReflectionPrompt)
    ]


def example(query: Query, policy: Policy, prompt: IntArray | None = None) -> Trajectory | None:
    """The query's prompt, or this one, and its written solution, closed by the end-of-text token; None without one."""
    text = written(query)
    if text is None:
        return None
    end = policy.tokenizer.eos_token_id
    ids = policy.tokenizer.encode(text, add_special_tokens=False)
    return Trajectory(
        plain_prompt(query, policy.tokenizer) if prompt is None else prompt,
        _ids([*ids, policy.stop_tokens[0] if end is None else end]),
    )


def _ids(values: Sequence[int]) -> IntArray:
    return np.asarray(values, np.int32)


class _Lessons:
    """The training loop over batches."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        examples: Sequence[Trajectory],
        heldout: Sequence[Trajectory],
        directory: RunDirectory,
    ) -> None:
        self.config, self.policy, self.directory = config, policy, directory
        self.examples, self.heldout = examples, heldout
        self.batches = list(self._batches())
        self.optimiser = Optimiser(policy.model.parameters(), config.train, len(self.batches))

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """(epoch, indices) of every batch: one seeded shuffle per epoch; train.steps may end it sooner."""
        size, order = self.config.train.queries_per_step, len(self.examples)
        every = [
            (epoch, part.tolist())
            for epoch in range(1, self.config.train.epochs + 1)
            for part in _split(np.random.default_rng([self.config.run.seed, epoch]).permutation(order), size)
        ]
        yield from every[: self.config.train.steps]

    def run(self) -> tuple[tuple[float, float], str | None]:
        before = after = self.heldout_loss()
        if self.heldout:
            self.directory.metrics.append(0, {"heldout/loss": before})
        with Progress(len(self.batches), SHOWN, trends=("loss",)) as progress, StopRequested() as stop:
            for step, (epoch, batch) in enumerate(self.batches, 1):
                metrics = {"epoch": epoch, **self.step(step, [self.examples[i] for i in batch])}
                if step == len(self.batches) or self.batches[step][0] != epoch:  # an epoch ends
                    after = self.heldout_loss()
                    metrics |= {"heldout/loss": after} if self.heldout else {}
                self.directory.metrics.append(step, metrics)
                progress.update(step, metrics)
                if stop and step < len(self.batches):
                    return (before, after), stop.name
        return (before, after), None

    def step(self, step: int, batch: Sequence[Trajectory]) -> dict[str, Any]:
        """One update on a batch."""
        tokens = sum(len(example.response) for example in batch)
        loss = 0.0
        self.policy.base.train()
        try:
            with packed(self.policy.base), self.policy.compiled():
                for part in pack([len(example) for example in batch], self.config.train.tokens_per_microbatch):
                    logprobs_T = self.policy.statistics([batch[i] for i in part], temperature=1.0).logprobs_T
                    share = -logprobs_T.sum() / tokens
                    share.backward()
                    loss += float(share.detach())
        finally:
            self.policy.base.eval()
        done = self.optimiser.step(step - 1)
        if done is None:
            raise Diverged(f"step {step}: the gradient is not finite; lower train.learning_rate and start again")
        return {"loss": loss, "grad_norm": done[0], "learning_rate": done[1], "tokens/trained": tokens}

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean negative log-likelihood per response token."""
        if not self.heldout:
            return math.nan
        total = 0.0
        for part in pack([len(example) for example in self.heldout], self.config.train.tokens_per_microbatch):
            total -= float(self.policy.statistics([self.heldout[i] for i in part], temperature=1.0).logprobs_T.sum())
        return total / sum(len(example.response) for example in self.heldout)


def _split(order: Any, size: int) -> list[Any]:
    return [order[first : first + size] for first in range(0, len(order), size)]
