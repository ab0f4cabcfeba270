"""What the adapters for TRL and verl share: another trainer's rows as verified groups, its run directory, its buffer.

From another trainer's answers to verified groups, and from the method's weights to those of the trainer's loss.

Prompts (plain text, or chat turns as dictionaries) are put into r3's terms and back. `importance` has the weights of
stale tokens, for trainers whose loss clips around the policy at the start of the step.

`RunRecorder` writes a run directory for `r3 view` inside the trainer's output folder. It has the method's metrics, the
rollouts with what R³ did to each group, and the settings. Weights and checkpoints stay with the trainer.

The buffer is one live file, held by one process, with a full copy in every checkpoint (`save_buffer`): so a checkpoint
can be moved, and resumed with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor

from r3.algorithm import Prompt
from r3.buffer import SampleBuffer
from r3.method.mixed import StepResult
from r3.method.objective import LOG_RATIO_LIMIT
from r3.method.settings import MethodSettings, ObjectiveSettings
from r3.policy.update import UpdateReport
from r3.run import RunDirectory, RunFiles
from r3.samples import FloatArray, Group, IntArray, Message, PromptText, Sample
from r3.train.record import StepNotes, group_summaries, ranking_metrics, rollout_rows, step_metrics

AnyMethod = TypeVar("AnyMethod", bound=MethodSettings)


@dataclass(frozen=True, slots=True)
class Answer:
    """One row as the trainer generated and judged it."""

    prompt: IntArray
    tokens: IntArray
    logprobs: FloatArray
    entropies: FloatArray | None
    truncated: bool
    right: bool
    rewards: Mapping[str, float]
    """The parts of its reward, by name."""


def to_groups(answered: Sequence[tuple[Prompt, Sequence[Answer]]], *, version: int, step: int) -> list[Group]:
    """The answers to each prompt as a verified group, in order, under the prompt tokens that were really used."""
    plain = {prompt.position: answers[0].prompt for prompt, answers in answered if prompt.context.kind == "plain"}
    groups = []
    for prompt, answers in answered:
        under = plain[prompt.position] if prompt.context.kind == "reflection" else None
        put = replace(prompt, tokens=answers[0].prompt, plain_tokens=under)
        groups.append(put.group([_sample(prompt, answer, version, step) for answer in answers]))
    return groups


def _sample(prompt: Prompt, answer: Answer, version: int, step: int) -> Sample:
    return Sample(
        prompt.query.id,
        answer.tokens,
        answer.logprobs,
        answer.entropies,
        finish="length" if answer.truncated else "stop",
        outcome=answer.right,
        reward=math.fsum(answer.rewards.values()),
        reward_parts=answer.rewards,
        context=prompt.context,
        policy_version=version,
        step=step,
        epoch=prompt.epoch,
    )


def scale_of(settings: MethodSettings, rows: int, tokens: int) -> Callable[[float, int], float]:
    """Turns a token's weight into a factor on the advantage, given what the trainer's loss divides a token of a row by.

    Trainers count rows (or tokens) where the method counts groups and their members: a mixed group of G + k members
    would weigh more than one of G. The factor is 1 wherever nothing joined and no row was added or dropped.
    """
    objective = settings.objective
    if objective.normalise == "token":
        return lambda weight, length: weight * tokens
    if objective.normalise == "constant":
        return lambda weight, length: weight * rows * objective.constant
    return lambda weight, length: weight * rows * length


def of_one_size(settings: AnyMethod, given: Mapping[str, Any]) -> AnyMethod:
    """The settings for a host whose groups all have one size, where a query's two prompts cannot share its G answers.

    Where only the preset says `reflection.budget=shared`, reflection costs one more group, as in the paper; if the
    user asked for it (`given`), it stays and is refused by name.
    """
    asked = given.get("reflection")
    if settings.reflection.budget != "shared" or (isinstance(asked, Mapping) and "budget" in asked):
        return settings
    return settings.model_copy(update={"reflection": settings.reflection.model_copy(update={"budget": "extra"})})


def prompt_id(prompt: Any) -> str:
    """A hash of the prompt as id: in data without ids, equal prompts are the same query."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def text_of(prompt: Any) -> PromptText:
    """The prompt as text or messages."""
    if isinstance(prompt, str):
        return prompt
    for turn in prompt:
        if not isinstance(turn["content"], str):
            raise ValueError("R³ trains on text: a prompt's content must be a string, not a list of parts")
    return tuple(Message(turn["role"], turn["content"]) for turn in prompt)


def turns_of(text: PromptText) -> str | list[dict[str, str]]:
    """The prompt in the form of the trainer's data."""
    if isinstance(text, str):
        return text
    return [turn.as_dict() for turn in text]


def importance(
    proximal_BC: Tensor, behaviour_BC: Tensor, mask_BC: Tensor, settings: ObjectiveSettings, *, by_sequence: bool
) -> Tensor:
    """w of `r3.method.objective`: min(π_prox/π_behave, C), and 0 beyond the gate. B rows, C tokens."""
    log_BC = (proximal_BC - behaviour_BC) * mask_BC
    if by_sequence:
        log_BC = (log_BC.sum(1, keepdim=True) / mask_BC.sum(1, keepdim=True)).expand_as(log_BC)
    weight_BC = log_BC.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=settings.importance_cap)
    if settings.ratio_gate is not None:
        weight_BC = weight_BC.masked_fill(log_BC.abs() > math.log(settings.ratio_gate), 0.0)
    return weight_BC


def importance_sums(weight_T: Tensor) -> Tensor:
    """Sums over replayed tokens' weights for `importance_metrics`; those of several processes can be added."""
    n_T = torch.ones_like(weight_T)
    return torch.stack([x.sum() for x in (weight_T, weight_T.square(), n_T * (weight_T == 0), n_T)])


def importance_metrics(sums: Tensor) -> dict[str, float]:
    """Mean weight, share of gated tokens and effective sample size of the replayed tokens."""
    total, squares, gated, n = sums.tolist()
    return {
        "replay/importance_mean": total / n,
        "replay/gated_share": gated / n,
        "replay/ess": total**2 / (n * squares) if squares else 0.0,
    }


# --------------------------------------------- the run directory and the buffer


log = logging.getLogger(__name__)
RUN_FOLDER = "r3_run"
OF_THE_TRAINER = ("update/", "tokens/trained", "memory/")
"""Metrics of r3's own loop that other trainers do not report, or report differently."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a run is made of, for its record."""

    method: MethodSettings
    settings: Mapping[str, Any]
    """Settings by section, for config.yaml; under r3's names where r3 has such a section."""
    defaults: Mapping[str, Any]
    """Defaults of the trainer's own section."""
    versions: Mapping[str, str]
    limit: int
    """Most tokens of an answer."""
    total_steps: int
    seed: int
    rollouts_every: int
    rollouts_groups: int


@dataclass(slots=True)
class _Step:
    number: int
    started: float
    results: list[StepResult] = field(default_factory=list)
    reflections: Counter[str] = field(default_factory=Counter)
    shown: StepNotes = field(default_factory=StepNotes)
    more: dict[str, float] = field(default_factory=dict)


class RunRecorder:
    """Writes a step's line and rollouts when the next step begins, since trainers report its loss only at its end."""

    def __init__(self, home: str, run: Described, tokenizer: Any, buffer: SampleBuffer, *, after: int | None) -> None:
        """`after`: the step whose checkpoint is resumed; None for a new run."""
        self._run, self._tokenizer, self._buffer = run, tokenizer, buffer
        self._step: _Step | None = None
        self._directory = _opened(Path(home) / RUN_FOLDER, run, after)
        self._directory.update_info(
            total_steps=run.total_steps,
            defaults=_plain(run.defaults),
            versions={**self._directory.info["versions"], **run.versions},
        )
        _link(self._directory.buffer_path, buffer)

    def begin(self, step: int) -> None:
        """A batch of that step is about to be generated. A step may have several."""
        if self._step is None or self._step.number != step:
            self.flush()
            self._step = _Step(step, time.perf_counter())

    def took(self, result: StepResult, reflections: Mapping[str, int], **more: float) -> None:
        """Take what the method decided about the batch."""
        assert self._step is not None, "begin comes first"
        of_step = self._step
        of_step.results.append(result)
        of_step.reflections.update(reflections)
        of_step.more |= more
        kept = result.groups[: self._run.rollouts_groups]
        shown = {mixed.group.context.shown for mixed in kept} - {None}
        attempts = self._buffer.find(number for number in shown if number is not None)
        of_step.shown = StepNotes(shown={**of_step.shown.shown, **attempts})

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the trainer's metrics of a step, under r3's names."""
        if self._step is not None and self._step.number == step:
            self._step.more |= metrics

    def flush(self) -> None:
        """Write the current step: before a checkpoint, before the next step, and when training ends."""
        of_step, self._step = self._step, None
        if of_step is None or not of_step.results:
            return
        run, result = self._run, _together(of_step.results)
        seconds = {"step": time.perf_counter() - of_step.started}
        metrics = step_metrics(result, UpdateReport(), seconds, of_step.reflections)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(OF_THE_TRAINER)}
        metrics |= ranking_metrics(result, run.limit, run.method.ranking) | of_step.more
        if run.rollouts_every and of_step.number % run.rollouts_every == 0:
            rows = rollout_rows(result, self._tokenizer, run.rollouts_groups, of_step.shown)
            self._directory.rollouts.write(of_step.number, rows, group_summaries(result))
        self._directory.metrics.append(of_step.number, metrics)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._directory.close()


def _opened(path: Path, run: Described, after: int | None) -> RunDirectory:
    there = RunFiles(path).info_path.exists()
    if there and after is not None:
        directory = RunDirectory.open(path)
        directory.rewind(after)
        return directory
    if there:
        RunDirectory.open(path).close()  # refuses while another process still writes to it
        log.warning("%s: starts anew, the record of an earlier run in it is removed", path)
        shutil.rmtree(path)
    return RunDirectory.create(path, yaml.safe_dump(_plain(run.settings), sort_keys=False), seed=run.seed)


def _together(results: list[StepResult]) -> StepResult:
    """The batches of a step as one."""
    if len(results) == 1:
        return results[0]
    counts: dict[str, float] = {}
    for name in results[0].counts:
        values = [result.counts.get(name, 0) for result in results]
        counts[name] = max(values) if name.endswith(("_max", "_mean")) else sum(values)
    weighted = tuple(w for result in results for w in result.weighted)
    return StepResult(weighted, tuple(mixed for result in results for mixed in result.groups), counts)


def _link(place: Path, buffer: SampleBuffer) -> None:
    """The trainer keeps the buffer's file elsewhere; by a relative link the folder can still be moved."""
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(buffer.path, place.parent))


def _plain(tree: Mapping[str, Any]) -> Any:
    """The value in types of JSON and YAML; other objects as text."""
    return json.loads(json.dumps(tree, default=str))


BUFFER_FILE = "r3_buffer.sqlite"


def open_buffer(path: str, checkpoint: str | None, *, per_query: int | None, total: int | None) -> SampleBuffer:
    """The buffer of a new run (empty), or of a resumed one (as it was at the checkpoint in that folder)."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    source = None if checkpoint is None else os.path.join(checkpoint, BUFFER_FILE)
    if source is not None and not os.path.exists(source):
        raise FileNotFoundError(
            f"{source} is missing: {checkpoint} was not written with R³; start a new run from its weights instead"
        )
    _make_way(path, warn=source is None)
    if source is not None:
        shutil.copyfile(source, path)
    return SampleBuffer(path, per_query=per_query, total=total)


def _make_way(path: str, *, warn: bool) -> None:
    """Remove an earlier run's live file: as with a trainer's checkpoints, a new run in the folder writes over it."""
    if not os.path.exists(path):
        return
    SampleBuffer(path).close()  # refuses while another process still writes to it
    if warn:
        log.warning("%s: starts empty, the samples of an earlier run in it are removed", path)
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            os.remove(name)


def save_buffer(buffer: SampleBuffer, folder: str) -> None:
    """Copy the buffer into the checkpoint in `folder`; the copy appears whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, BUFFER_FILE)
    partial = target + ".partial"
    if os.path.exists(partial):
        os.remove(partial)
    buffer.copy(partial)
    os.replace(partial, target)
    newest = buffer.stats().newest_step
    if newest is not None:
        buffer.settle(newest)  # a resume starts from a copy, so the live file is never rewound


def prune_copies(home: str, pattern: str, *, needs: str) -> None:
    """Remove the copies in checkpoints under `home` that the trainer has deleted: those without `needs`."""
    for copy in Path(home).glob(f"{pattern}/{BUFFER_FILE}"):
        if not (copy.parent / needs).exists():
            copy.unlink()
