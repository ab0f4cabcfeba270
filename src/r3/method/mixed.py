"""What a step compares and trains on: members of mixed groups, and sequences with their weight in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r3.method.replay import ReplayReason
from r3.samples import FloatArray, Group, IntArray, Sample

Origin = Literal["fresh", "replayed", "reflection", "hint", "critique", "demonstration"]
"""Drawn in this step under the plain prompt; in an earlier step; in this step under a prompt that shows a past failure,
a hint or a failure of this step; or never drawn: an answer from the data."""
FROM_ELSEWHERE: tuple[Origin, ...] = ("replayed", "demonstration")
"""Not drawn by the policy of the step: it meets these tokens for the first time when it is trained on them."""
JOINING: tuple[Origin, ...] = (*FROM_ELSEWHERE, "critique")
"""What may join a group that it was not drawn for."""


@dataclass(frozen=True, slots=True)
class WeightedSample:
    """One sequence to train on: `prompt` then `sample.tokens`, each response token weighing `weight` · `advantage`."""

    prompt: IntArray
    sample: Sample
    advantage: float
    """Of each of its tokens, or their mean where they differ."""
    weight: float
    """What one token of it weighs in the loss, all denominators included."""
    origin: Origin
    other_context: bool
    """Drawn under another prompt than `prompt`: the sample's own log-probs do not apply."""
    group: int
    """Which of the step's groups it belongs to."""
    member: int
    """Which of that group's members it is."""
    token_advantages: FloatArray | None = None
    """Of each token, where they differ; None: `advantage`. [length]"""
    first_logprobs: FloatArray | None = None
    """Of a sample from another context: its log-probs under `prompt` when it was first replayed there. [length]"""

    @property
    def recomputed(self) -> bool:
        """Whether nobody knows how likely it was under `prompt` before: the policy of the step stands in."""
        return self.other_context and self.first_logprobs is None

    @property
    def behaviour_T(self) -> FloatArray:
        """Log-probs that its ratio is taken to, unless they are `recomputed`."""
        return self.sample.logprobs if self.first_logprobs is None else self.first_logprobs

    @property
    def advantage_T(self) -> FloatArray:
        """Of each token, whether they differ or not."""
        if self.token_advantages is not None:
            return self.token_advantages
        return np.full(len(self.sample), self.advantage, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Member:
    """A response in a mixed group, and what came of comparing it with the others."""

    sample: Sample
    reward: float
    """What it was compared by: of a replayed sample, the reward of its outcome alone."""
    advantage: float
    """Of each of its tokens, or their mean where they differ."""
    origin: Origin
    token_advantages: FloatArray | None = None
    """Of each token, where they differ; None: `advantage`. [length]"""
    left_out: bool = False
    """A fresh sample whose place another took, or that its group was not drawn for: neither compared nor trained on."""

    @property
    def teaches(self) -> bool:
        return self.advantage != 0.0 or (self.token_advantages is not None and bool(self.token_advantages.any()))


@dataclass(frozen=True, slots=True)
class MixedGroup:
    """A group after ranking and replay: G_mix = G ∪ G_C."""

    group: Group
    """As it was drawn and judged."""
    members: tuple[Member, ...]
    """The fresh samples in the group's order, with their ranking rewards; then what joined, the replayed ones first."""
    replay: ReplayReason
    """'joined' where past samples joined, else why not."""
    ranked: int
    """How many fresh samples were ranked by SERR."""
    by_itself: bool = False
    """Whether `advantage.homogeneous` says what its answers are worth, which nothing else told apart."""

    @property
    def compared(self) -> tuple[Member, ...]:
        """All but those whose place another took."""
        return tuple(member for member in self.members if not member.left_out)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(member.reward for member in self.members)

    @property
    def advantages(self) -> tuple[float, ...]:
        return tuple(member.advantage for member in self.members)

    @property
    def fresh(self) -> tuple[Sample, ...]:
        """G, with the ranking rewards."""
        return tuple(member.sample for member in self.members[: len(self.group)])

    @property
    def replayed(self) -> tuple[Sample, ...]:
        """G_C."""
        return tuple(member.sample for member in self.joined if member.origin == "replayed")

    @property
    def joined(self) -> tuple[Member, ...]:
        """All that it was not drawn for."""
        return self.members[len(self.group) :]

    @property
    def teaches(self) -> bool:
        return any(member.teaches for member in self.members)

    @property
    def by_ranking_alone(self) -> bool:
        """Whether nothing but ranking rewards tells its members apart."""
        return self.ranked > 0 and not outcomes_differ([member.sample for member in self.compared])

    @property
    def kept(self) -> bool:
        """Whether DAPO's resampling keeps it: outcomes differ, or replay or ranking made them comparable."""
        made_comparable = outcomes_differ([member.sample for member in self.compared])
        return is_mixed(self.group) or made_comparable or self.ranked > 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the trainer trains on, what the buffer stores, what the metrics count."""

    weighted: tuple[WeightedSample, ...]
    groups: tuple[MixedGroup, ...]
    counts: Mapping[str, float]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every fresh sample with its final reward, for the buffer."""
        return tuple(sample for mixed in self.groups for sample in mixed.fresh)

    def stored_as(self, ids: Sequence[int]) -> StepResult:
        """The same, once the buffer has given `samples` these ids."""
        before = self.samples
        stored = [sample.stored_as(number) for sample, number in zip(before, ids, strict=True)]
        fresh = iter(stored)
        # A refinement is a member twice: of the group it was drawn in, and of the one that it joined.
        again = {id(old): new for old, new in zip(before, stored, strict=True)}
        groups = tuple(
            replace(
                mixed,
                members=(
                    *(replace(m, sample=next(fresh)) for m in mixed.members[: len(mixed.group)]),
                    *(replace(m, sample=again.get(id(m.sample), m.sample)) for m in mixed.joined),
                ),
            )
            for mixed in self.groups
        )
        weighted = tuple(replace(w, sample=groups[w.group].members[w.member].sample) for w in self.weighted)
        return StepResult(weighted, groups, self.counts)


def is_mixed(group: Group) -> bool:
    """Some right, some wrong: the only groups GRPO learns from and DAPO keeps."""
    return not group.solve_none and not group.solve_all


def outcomes_differ(samples: Sequence[Sample]) -> bool:
    return len({sample.outcome for sample in samples}) > 1
