"""What a step compares and trains on: members of mixed groups, and sequences with their weight in the loss.

`weighted` says what each token of a step weighs in the loss, and under which prompts its sequences are trained.

`times_counted` says how often the loss counts each group, where groups without variance leave the batch (`resample`).

    fill: draw    DAPO, arXiv 2503.14476: other queries were drawn in their place; each group that stays counts once
    fill: copy    POLARIS, ChenxinAn-fdu/POLARIS, `dyn_sampling_polaris`: random copies of the groups that stay take the
                  place of those that leave; if at most min_share of the batch stays, the step trains on nothing

A copy is a weight: a group that counts twice has twice the gradient and counts twice in the denominators.

Departures from POLARIS: copies are drawn with putting back; a copy goes into the same share of the batch as its group
(with several updates per batch theirs may fall into two); reflection groups that teach stay, and are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r3.method.replay import ReplayReason
from r3.method.settings import MethodSettings, ObjectiveSettings, ResampleSettings
from r3.samples import FloatArray, Group, IntArray, Joins, Sample

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
    """The advantage of each of its tokens, or their mean where they differ."""
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
    """The advantage of each token, where they differ; None: `advantage`. [length]"""
    first_logprobs: FloatArray | None = None
    """Log-probs of a sample from another context under `prompt`, when it was first replayed there. [length]"""

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
        """The advantage of each token, whether they differ or not."""
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
    """The advantage of each of its tokens, or their mean where they differ."""
    origin: Origin
    token_advantages: FloatArray | None = None
    """The advantage of each token, where they differ; None: `advantage`. [length]"""
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

        def joined(member: Member) -> Member:
            """A refinement is a member twice: of the group it was drawn in, and of the one that it joined."""
            if member.sample.id is not None:  # from the buffer
                return member
            twins = (new for old, new in zip(before, stored, strict=True) if old is member.sample)
            return replace(member, sample=next(twins, member.sample))

        groups = tuple(
            replace(
                mixed,
                members=(
                    *(replace(m, sample=next(fresh)) for m in mixed.members[: len(mixed.group)]),
                    *map(joined, mixed.joined),
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


# ---------------------------------------------------------- weights in the loss


def weighted(
    groups: Sequence[MixedGroup],
    times: Sequence[int],
    settings: MethodSettings,
    joins: Mapping[str, Mapping[bytes, Joins]],
) -> Iterator[WeightedSample]:
    """The sequences of a step to train on; `times` says how often the loss counts each group."""
    in_loss = {g: members for g, mixed in enumerate(groups) if times[g] and (members := _in_loss(mixed, settings))}
    plain = [g for g in in_loss if groups[g].group.context.kind in ("plain", "hint")]
    # The loss is a mean over all groups, or one per query: the plain one, or the hinted one that took its place.
    base = plain if plain and settings.objective.mean_over == "queries" else list(in_loss)
    counted = sum(times[g] for g in base)
    tokens = sum(times[g] * len(groups[g].members[i].sample) for g in base for i in in_loss[g])
    for g, members in in_loss.items():
        for i in members:
            member = groups[g].members[i]
            if not member.teaches:
                continue
            weight = token_weight(len(member.sample), counted, len(members), tokens, settings.objective) * times[g]
            prompts = training_prompts(groups[g].group, member, settings)
            for prompt, moved in prompts:
                yield WeightedSample(
                    prompt,
                    member.sample,
                    member.advantage,
                    weight / len(prompts),
                    member.origin,
                    moved,
                    g,
                    i,
                    member.token_advantages,
                    _first_logprobs(member, settings, joins) if moved else None,
                )


def _first_logprobs(
    member: Member, settings: MethodSettings, joins: Mapping[str, Mapping[bytes, Joins]]
) -> FloatArray | None:
    """The log-probs of a replayed sample from another context at its first replay, if the ratio is taken to those."""
    if member.origin != "replayed" or settings.replay.ratio == "drawn":
        return None
    before = joins.get(member.sample.query_id, {}).get(member.sample.fingerprint)
    return None if before is None else before.logprobs


def _in_loss(mixed: MixedGroup, settings: MethodSettings) -> list[int]:
    """The members of a group that the loss and its denominators count."""
    return [
        i for i, m in enumerate(mixed.members) if not (m.left_out or (settings.mask_truncated and m.sample.truncated))
    ]


def token_weight(length: int, groups: int, members: int, tokens: int, objective: ObjectiveSettings) -> float:
    """What one token of a sample of `length` tokens weighs, in a batch of `groups` groups and `tokens` tokens.

    >>> [token_weight(10, 2, 5, 400, ObjectiveSettings(name=n)) for n in ("grpo", "dapo")]  # 1/(2·5·10), 1/400
    [0.01, 0.0025]
    """
    if objective.normalise == "token":
        return 1.0 / tokens
    per_sequence = objective.constant if objective.normalise == "constant" else length
    return 1.0 / (groups * members * per_sequence)


def training_prompts(group: Group, member: Member, settings: MethodSettings) -> list[tuple[IntArray, bool]]:
    """The prompt(s) a member is trained under, each with whether it was drawn under another one.

    That is its group's prompt; answers to a reflection prompt may go under the plain one instead, or under both.
    """
    if member.origin != "reflection" or settings.reflection.train_as == "reflection":
        return [(group.prompt, member.sample.context.kind != group.context.kind)]
    if group.plain_prompt is None:
        raise ValueError(
            f"train_as={settings.reflection.train_as} needs the plain prompt of the reflection group of "
            f"{group.query.id!r}"
        )
    plain = (group.plain_prompt, True)
    return [plain] if settings.reflection.train_as == "plain" else [(group.prompt, False), plain]


def times_counted(groups: Sequence[MixedGroup], settings: ResampleSettings, rng: np.random.Generator) -> list[int]:
    """How often the loss counts each group."""
    if not settings.enabled:
        return [1] * len(groups)
    times = [int(mixed.kept) for mixed in groups]
    if settings.fill == "draw":
        return times
    plain = [index for index, mixed in enumerate(groups) if mixed.group.context.kind == "plain"]
    stay = [index for index in plain if times[index]]
    # A share that is a fraction of the batch, such as 1/3 of 6, is meant exactly.
    if len(stay) <= math.floor(settings.min_share * len(plain) + 1e-9):
        return [0] * len(groups)
    for index in rng.choice(stay, len(plain) - len(stay)).tolist():
        times[index] += 1
    return times
