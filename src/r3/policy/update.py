"""The update: weighted samples in, optimiser steps out. It is blind to the method.

Samples are packed into micro-batches by a token budget. The rollout's own log-probs are the behaviour log-probs, so one
update per batch needs one forward and one backward, nothing else. Only with several updates per batch are the log-probs
of replayed samples and of those drawn under another prompt computed beforehand (the policy moves in between).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from r3.errors import DIVERGED, R3Error, RunError
from r3.method.mixed import FROM_ELSEWHERE, WeightedSample
from r3.method.objective import ORIGINS, Diagnostics, TokenBatch, policy_loss
from r3.method.settings import ObjectiveSettings
from r3.policy import OptimiserSettings
from r3.policy.attention import packed, to_device
from r3.policy.layers import onednn
from r3.policy.model import Policy
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory, pack, pack_sharing
from r3.policy.world import ShardedPolicy, World
from r3.samples import FloatArray

log = logging.getLogger(__name__)


class Diverged(R3Error, RuntimeError):
    """Too many updates in a row had NaN or infinite gradients."""

    exit_code = DIVERGED


@dataclass
class UpdateReport:
    """What the update did, for the metrics."""

    updates: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    microbatches: int = 0
    extra_forwards: int = 0
    """Sequences that went through a model once more, without a gradient, than training on them takes."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    log_ratios: dict[int, FloatArray] = field(default_factory=dict)
    """Per token, log π/π_behave when it was trained on; by the weighted sample's index."""
    start_logprobs: dict[int, FloatArray] = field(default_factory=dict)
    """Log-probs at the start of the step of the samples whose own do not apply, by the weighted sample's index."""


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Log-probs at the start of the step and under the reference policy, by weighted sample, where computed."""

    proximal: dict[int, Tensor]
    reference: dict[int, Tensor]


@dataclass
class _Done:
    """What the micro-batches of an update left: which samples, in order, and what was seen of their tokens."""

    order: list[int] = field(default_factory=list)
    seen: list[Diagnostics] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    start: dict[int, Tensor] = field(default_factory=dict)
    """Log-probs at the start of the step of samples whose own do not apply, by index."""

    def add(self, chosen: Sequence[int], diagnostics: Diagnostics, entropies: Tensor) -> None:
        self.order += chosen
        self.seen.append(diagnostics)
        self.entropies.append(entropies)

    def packed(self, *, on_host: bool) -> _Done:
        """Ready to be sent to another process."""
        if not on_host:
            return self
        start = {i: part.cpu() for i, part in self.start.items()}
        return _Done(self.order, [part.cpu() for part in self.seen], [part.cpu() for part in self.entropies], start)


class Updater:
    """Trains the policy on weighted samples."""

    def __init__(
        self,
        policy: Policy,
        optimiser: Optimiser,
        objective: ObjectiveSettings,
        settings: OptimiserSettings,
        temperature: float,
        *,
        exact: bool = True,
        world: World | None = None,
        sharded: ShardedPolicy | None = None,
    ) -> None:
        self.policy = policy
        self.sharded = sharded
        """The copy that is trained instead, where it is split over the processes; whoever trains it, all must."""
        self.trained = sharded or policy
        self.optimiser = optimiser
        self.objective = objective
        self.settings = settings
        self.temperature = temperature
        self.exact = exact
        """Whether the rollout's log-probs are the policy's own; if not, fresh samples are corrected like stale ones."""
        self.world = world or World()
        self.bad_in_a_row = 0
        self._forwards = 0

    def update(self, weighted: Sequence[WeightedSample], *, version: int, seed: Sequence[int]) -> UpdateReport:
        """Make `updates_per_batch` optimiser updates; `version` is the number of updates made before.

        In a world of several processes each takes its share of the micro-batches; the report is whole at rank 0.
        """
        report, self._forwards = UpdateReport(), 0
        if not weighted:
            return report
        parts = [self._share(self._microbatches(weighted, part), weighted) for part in self._split(len(weighted), seed)]
        old = self._old_logprobs(weighted, [i for part in parts for chosen in part for i in chosen], len(parts) > 1)
        done = _Done()
        with self._training():
            for number, part in enumerate(parts):
                loss = torch.zeros((), device=self.policy.device)
                for chosen in part:
                    if not chosen and self.sharded is not None:
                        self.sharded.join(_sequence(weighted[0]))
                        continue
                    # Each of several updates sees a share of the batch: scaled up, its gradient is that of a batch.
                    loss += self._backward(weighted, chosen, old, done, scale=float(len(parts)))
                if self.world.size > 1 and self.sharded is None:
                    self.world.sum_(self.optimiser.gradients())
                self._step(version + number, float(loss), report)
        report.microbatches, report.extra_forwards = len(done.seen), self._forwards
        if (everyones := self.world.gather((done.packed(on_host=self.world.size > 1), report))) is not None:
            self._whole(weighted, everyones, report)
        return report

    def optimiser_state(self) -> dict[str, Any]:
        """The optimiser's whole state, for a checkpoint."""
        with self.world.together():
            return self.optimiser.state()

    def _whole(
        self, weighted: Sequence[WeightedSample], everyones: Sequence[tuple[_Done, UpdateReport]], report: UpdateReport
    ) -> None:
        """Complete the report with what every rank saw."""
        dones = [done for done, _ in everyones if done.seen]
        reports = [rank_report for _, rank_report in everyones]
        if any(other.grad_norms != report.grad_norms for other in reports):
            raise RunError("processes disagree on the gradient they share: memory or a link is faulty; resume the run")
        report.losses = [sum(losses) for losses in zip(*(other.losses for other in reports), strict=True)]
        report.microbatches = sum(other.microbatches for other in reports)
        report.extra_forwards = sum(other.extra_forwards for other in reports)
        merged = Diagnostics.merge([part for done in dones for part in done.seen])
        report.diagnostics = merged.summary()
        order = [i for done in dones for i in done.order]
        parts_T = merged.log_ratio_T.float().cpu().split([len(weighted[i].sample) for i in order])
        report.log_ratios = {i: part_T.numpy() for i, part_T in zip(order, parts_T, strict=True)}
        report.start_logprobs = {i: part_T.float().cpu().numpy() for done in dones for i, part_T in done.start.items()}
        report.entropy = float(torch.cat([part for done in dones for part in done.entropies]).mean())
        report.tokens = sum(len(w.prompt) + len(w.sample) for w in weighted)

    def _share(self, batches: list[list[int]], weighted: Sequence[WeightedSample]) -> list[list[int]]:
        """This rank's micro-batches: dealt to whoever has the fewest tokens so far.

        Where the trained copy is sharded, empty ones make them as many as anybody has: all gather its layers together.
        """
        load = [0] * self.world.size
        dealt: list[list[list[int]]] = [[] for _ in load]
        for batch in batches:
            rank = load.index(min(load))
            load[rank] += sum(len(weighted[i].prompt) + len(weighted[i].sample) for i in batch)
            dealt[rank].append(batch)
        share = dealt[self.world.rank]
        if self.sharded is not None:
            share = share + [[]] * (max(map(len, dealt)) - len(share))
        return share

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Training mode, packed attention and fast products, forward and backward."""
        self.trained.base.train()
        try:
            with self.world.together(), packed(self.trained.base), self.trained.compiled(), onednn(self.trained.base):
                yield
        finally:
            self.trained.base.eval()

    def _split(self, n: int, seed: Sequence[int]) -> list[list[int]]:
        """Disjoint shares of the batch, one per update, drawn without order."""
        updates = min(self.settings.updates_per_batch, n)
        order = np.random.default_rng(list(seed)).permutation(n) if updates > 1 else np.arange(n)
        return [share.tolist() for share in np.array_split(order, updates)]

    def _microbatches(self, weighted: Sequence[WeightedSample], part: Sequence[int]) -> list[list[int]]:
        sequences, budget = [_sequence(weighted[i]) for i in part], self.settings.tokens_per_microbatch
        sharing = self.policy.shares(sequences)
        batches = pack_sharing(sequences, budget) if sharing else pack([len(s) for s in sequences], budget)
        return [[part[j] for j in batch] for batch in batches]

    def _backward(
        self, weighted: Sequence[WeightedSample], chosen: Sequence[int], old: OldLogprobs, done: _Done, scale: float
    ) -> Tensor:
        """The loss of a micro-batch, whose gradient is then added; what was seen of it goes into `done`."""
        samples = [weighted[i] for i in chosen]
        statistics = self.trained.statistics([_sequence(w) for w in samples], temperature=self.temperature)
        proximal_T = _joined(old.proximal, chosen)
        if proximal_T is None and not self.exact:
            proximal_T = statistics.logprobs_T.detach()
        batch = token_batch(samples, self.policy.device, proximal_T, _joined(old.reference, chosen))
        result = policy_loss(statistics.logprobs_T, batch, self.objective)
        (result.loss * scale).backward()
        done.add(chosen, result.diagnostics, statistics.entropies_T.detach())
        start_T = statistics.logprobs_T.detach() if proximal_T is None else proximal_T
        parts_T = start_T.split([len(w.sample) for w in samples])
        done.start |= {i: part_T for i, part_T in zip(chosen, parts_T, strict=True) if weighted[i].recomputed}
        return result.loss.detach()

    def _step(self, update: int, loss: float, report: UpdateReport) -> None:
        done = self.optimiser.step(update)
        if done is None:
            self.bad_in_a_row += 1
            report.skipped += 1
            log.warning("update %d skipped: its gradient is not finite (%d in a row)", update, self.bad_in_a_row)
            if self.bad_in_a_row >= self.settings.max_bad_updates:
                raise Diverged(
                    f"{self.bad_in_a_row} updates in a row had NaN or infinite gradients: lower train.learning_rate or "
                    "train.max_grad_norm"
                )
            return
        self.bad_in_a_row = 0
        norm, report.learning_rate = done
        report.updates += 1
        report.losses.append(loss)
        report.grad_norms.append(norm)

    @torch.no_grad()
    def _old_logprobs(self, weighted: Sequence[WeightedSample], share: Sequence[int], several: bool) -> OldLogprobs:
        proximal: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        if several:
            moved = [
                i for i in share if not self.exact or weighted[i].origin in FROM_ELSEWHERE or weighted[i].other_context
            ]
            proximal = self._logprobs(self.policy, weighted, moved)
            for i in share:
                if i not in proximal:
                    proximal[i] = torch.from_numpy(weighted[i].sample.logprobs.copy()).to(self.policy.device)
        if self.objective.kl > 0:
            with self.policy.reference() as frozen:
                reference = self._logprobs(frozen, weighted, share)
        return OldLogprobs(proximal, reference)

    def entropies(self, sequences: Sequence[Trajectory]) -> list[FloatArray]:
        """The entropies of each response, token by token, under the policy as it is now: for engines that give none."""
        return self._measured(sequences, "entropies_T")

    def logprobs(self, sequences: Sequence[Trajectory]) -> list[FloatArray]:
        """The log-probs of each response, token by token, under the policy as it is now."""
        return self._measured(sequences, "logprobs_T")

    @torch.no_grad()
    def _measured(
        self, sequences: Sequence[Trajectory], what: Literal["entropies_T", "logprobs_T"]
    ) -> list[FloatArray]:
        measured: dict[int, FloatArray] = {}
        for chosen in pack([len(s) for s in sequences], self.settings.tokens_per_microbatch):
            batch = [sequences[i] for i in chosen]
            values_T: Tensor = getattr(self.policy.statistics(batch, temperature=self.temperature), what)
            parts = values_T.float().cpu().split([len(s.response) for s in batch])
            measured.update(zip(chosen, (part.numpy() for part in parts), strict=True))
        return [measured[i] for i in range(len(sequences))]

    def _logprobs(self, policy: Policy, weighted: Sequence[WeightedSample], which: Sequence[int]) -> dict[int, Tensor]:
        logprobs: dict[int, Tensor] = {}
        self._forwards += len(which)
        for chosen in self._microbatches(weighted, which) if which else []:
            logprobs_T = policy.statistics(
                [_sequence(weighted[i]) for i in chosen], temperature=self.temperature
            ).logprobs_T
            lengths = [len(weighted[i].sample) for i in chosen]
            logprobs.update(zip(chosen, logprobs_T.split(lengths), strict=True))
        return logprobs


def token_batch(
    samples: Sequence[WeightedSample],
    device: torch.device,
    proximal_T: Tensor | None = None,
    reference_T: Tensor | None = None,
) -> TokenBatch:
    """The packed response tokens of these samples, as the objective wants them."""
    lengths = torch.tensor([len(w.sample) for w in samples])
    sequence_T = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    behaviour_T = torch.from_numpy(np.concatenate([w.behaviour_T for w in samples]))
    return TokenBatch(
        sequence_T=to_device(sequence_T, device),
        behaviour_T=to_device(behaviour_T, device),
        advantage_T=to_device(torch.from_numpy(np.concatenate([w.advantage_T for w in samples])), device),
        weight_S=to_device(torch.tensor([w.weight for w in samples], dtype=torch.float32), device),
        origin_S=to_device(torch.tensor([ORIGINS.index(w.origin) for w in samples]), device),
        other_context_S=to_device(torch.tensor([w.recomputed for w in samples]), device),
        proximal_T=proximal_T,
        reference_T=reference_T,
    )


def _sequence(weighted: WeightedSample) -> Trajectory:
    return Trajectory(weighted.prompt, weighted.sample.tokens)


def _joined(by_sample: dict[int, Tensor], chosen: Sequence[int]) -> Tensor | None:
    return torch.cat([by_sample[i] for i in chosen]) if by_sample else None
