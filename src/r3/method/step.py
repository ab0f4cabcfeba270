"""Algorithm 1 from a batch's verified rollouts to weighted samples: one pure function, `step`.

For every group, in the paper's order: rank the truncated answers of a solve-none group (SERR), let history of the
opposite outcome join a homogeneous one (CCR), take Eq. 3's advantages over what is then the group, and give each
sample the weight its tokens have in the loss. The trainer that follows is blind to the method: it sees prompts,
tokens, an advantage and a weight.

GRPO is this with everything off; DAPO is this with `resample` (groups without variance leave the batch) and its
objective; R³ is this with all three on; an ablation turns one off. None is a branch of its own (`r3.method.presets`).

Departures from the paper, and choices it leaves open:
- A sample with advantage 0 is not handed on: it has no gradient. Its tokens stay in the loss's denominators, so
  skipping changes nothing but the time. (With a KL penalty peers still train on such samples; here they are skipped.)
- The weight of a sample: every group counts the same, and every member of a (mixed) group the same within it. With
  normalise = token, every token of the batch counts the same instead.
- The loss is a mean over the batch's queries: a reflection group, which is one more group of its query, adds to the
  gradient. As a mean over all groups (`objective.mean_over` = groups) every reflection group, most of which teach
  nothing, would make all others count less. In groups or tokens, the plain prompts' are the denominator.
- All truncated answers tied: no ranking reward is paid, or being cut would by itself outrank a complete wrong answer.
- The paper pays truncated answers at least 0, their mean above it, and complete wrong ones 0: with many solve-none
  groups a policy learns to be cut. `ranking.centred` takes the mean off and leaves only the order.
- Eq. 1 divides by the standard deviation, so that in a group with ranking rewards alone R_max cancels: they then pull
  as hard as right answers do elsewhere. `ranking.standardised` = false leaves such a group's advantages undivided.
- Adam does the same to a batch of such groups alone, which is common where successes are rare. `ranking.alone` = false
  lets nothing be learnt from ranking rewards unless an outcome teaches beside them.
- `mask_truncated` takes truncated samples out of the loss and out of its denominators, not out of the baseline.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r3.method.advantage import group_advantages, over_batch
from r3.method.ranking import annealed, structural_entropy_rewards
from r3.method.replay import Replay, choose_replay, outcome_reward
from r3.method.settings import MethodSettings, ObjectiveSettings
from r3.samples import Group, IntArray, Sample

Origin = Literal["fresh", "replayed", "reflection"]
_Counted = Sequence[tuple["MixedGroup", Sequence[bool]]]
"""Groups, and which of their members count in the loss."""


@dataclass(frozen=True, slots=True)
class WeightedSample:
    """One sequence to train on: `prompt` then `sample.tokens`, each response token weighing `weight` · `advantage`."""

    prompt: IntArray
    sample: Sample
    advantage: float
    weight: float
    """What one token of it weighs in the loss, all denominators included."""
    origin: Origin
    other_context: bool = False
    """Drawn under another prompt than `prompt`: its behaviour log-probs do not apply and must be recomputed."""


@dataclass(frozen=True, slots=True)
class MixedGroup:
    """A group after ranking and replay: what was compared with what, and what came of it."""

    group: Group
    """The fresh samples, ranking rewards included."""
    replay: Replay
    rewards: tuple[float, ...]
    """Fresh samples first, then replayed ones; so are the advantages."""
    advantages: tuple[float, ...]
    ranked: int
    """How many fresh samples were ranked by SERR."""

    @property
    def members(self) -> tuple[Sample, ...]:
        """G_mix = G ∪ G_C."""
        return self.group.samples + self.replay.samples

    @property
    def teaches(self) -> bool:
        return any(self.advantages)

    @property
    def by_ranking_alone(self) -> bool:
        """Whether nothing but ranking rewards tells its members apart."""
        return self.ranked > 0 and not self.replay.samples

    @property
    def kept(self) -> bool:
        """Whether DAPO's resampling keeps it: outcomes differ, or replay or ranking made them comparable."""
        return is_mixed(self.group) or bool(self.replay.samples) or self.ranked > 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the trainer trains on, what the buffer stores, what the metrics count."""

    weighted: tuple[WeightedSample, ...]
    groups: tuple[MixedGroup, ...]
    counts: Mapping[str, float]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every fresh sample with its final reward, for the buffer."""
        return tuple(sample for mixed in self.groups for sample in mixed.group.samples)


def is_mixed(group: Group) -> bool:
    """Some right, some wrong: the only groups GRPO learns from and DAPO keeps."""
    return not group.solve_none and not group.solve_all


def step(
    groups: Sequence[Group],
    settings: MethodSettings,
    *,
    history: Mapping[str, Sequence[Sample]] | None = None,
    policy_version: int = 0,
    seed: int = 0,
) -> StepResult:
    """Turn a batch of verified groups and their queries' history into weighted samples.

    A worked example. Four answers to one query, all wrong: GRPO learns nothing from them. The query's history
    holds one right answer, from two updates ago; it joins, and the five are compared with each other.

    >>> from r3.samples import Group, Query, Sample
    >>> def answer(tokens, outcome, **more):
    ...     return Sample("q", tokens, [-0.5] * len(tokens), outcome=outcome, reward=float(outcome), **more)
    >>> wrong = [answer([4, i], False, policy_version=2) for i in range(4)]
    >>> group = Group(Query("q", "1+1="), wrong, prompt=[7, 8])
    >>> past = [answer([5, 6], True, policy_version=0, id=1)]
    >>> step([group], MethodSettings(name="grpo"), policy_version=2).weighted
    ()
    >>> result = step([group], MethodSettings(name="r3"), history={"q": past}, policy_version=2)
    >>> [(w.origin, round(w.advantage, 3), round(w.weight, 3)) for w in result.weighted]
    [('fresh', -0.5, 0.1), ('fresh', -0.5, 0.1), ('fresh', -0.5, 0.1), ('fresh', -0.5, 0.1), ('replayed', 2.0, 0.1)]

    A token weighs 1 / (1 group · 5 members · 2 tokens). The lone success has √(5−1) = 2, so the advantages sum to 0.
    """
    past = history or {}
    mixed = tuple(_mix(group, past.get(group.query.id, ()), settings, policy_version, seed) for group in groups)
    if settings.advantage.scale == "batch_std":
        mixed = _over_batch(mixed, settings)
    if not settings.ranking.alone and not any(m.teaches and not m.by_ranking_alone for m in mixed):
        mixed = tuple(replace(m, advantages=(0.0,) * len(m.advantages)) for m in mixed)
    trained = [m for m in mixed if m.kept or not settings.resample.enabled]
    weighted = tuple(_weighted(trained, settings))
    return StepResult(weighted, mixed, _counts(mixed, weighted, policy_version))


def _mix(group: Group, history: Sequence[Sample], settings: MethodSettings, version: int, seed: int) -> MixedGroup:
    ranked_group, ranked = _rank(group, settings, version)
    # Seeded by query, so that the choice does not depend on which other groups are in the batch.
    rng = None
    if settings.replay.order == "random":
        rng = np.random.default_rng([seed, version, zlib.crc32(group.query.id.encode())])
    replay = choose_replay(group, history, settings.replay, policy_version=version, rng=rng)
    rewards = [sample.reward for sample in ranked_group.samples] + [outcome_reward(s) for s in replay.samples]
    options = settings.advantage
    ranking_alone = ranked > 0 and not replay.samples
    scale, cap = options.scale, options.cap
    if scale == "batch_std":  # what it is divided by, only the whole batch tells (`_over_batch`)
        scale, cap = "none", None
    elif ranking_alone and not settings.ranking.standardised:
        scale = "none"
    advantages = group_advantages(
        rewards,
        alpha=options.alpha if replay.samples else 1.0,
        eps=options.eps,
        scale=scale,
        baseline=options.baseline,
        cap=cap,
    )
    return MixedGroup(ranked_group, replay, tuple(rewards), tuple(advantages), ranked)


def _over_batch(mixed: Sequence[MixedGroup], settings: MethodSettings) -> tuple[MixedGroup, ...]:
    """The groups with their centred rewards divided by the batch's standard deviation, where they are to be divided."""
    options = settings.advantage
    divided = [i for i, m in enumerate(mixed) if settings.ranking.standardised or not m.by_ranking_alone]
    alphas = [options.alpha if mixed[i].replay.samples else 1.0 for i in divided]
    advantages = over_batch([mixed[i].advantages for i in divided], alphas, eps=options.eps, cap=options.cap)
    scaled = dict(zip(divided, advantages, strict=True))
    return tuple(replace(m, advantages=tuple(scaled.get(i, m.advantages))) for i, m in enumerate(mixed))


def _rank(group: Group, settings: MethodSettings, version: int) -> tuple[Group, int]:
    """The group with SERR added to its truncated (or failed) samples, if it solved none; and how many were ranked."""
    ranking = settings.ranking
    if not ranking.enabled or not group.solve_none:
        return group, 0
    in_scope = [i for i, s in enumerate(group.samples) if s.truncated or ranking.scope == "failed"]
    entropies = [group.samples[i].entropies for i in in_scope]
    if any(h is None for h in entropies):
        raise ValueError(f"the ranking reward needs entropies, and samples of query {group.query.id!r} have none")
    paid = structural_entropy_rewards(
        [h for h in entropies if h is not None],
        peak_fraction=ranking.peak_fraction,
        max_reward=annealed(ranking.max_reward, version, ranking.anneal_updates),
    )
    if len(paid) < 2 or min(paid) == max(paid):
        return group, 0
    if ranking.centred:
        mean = math.fsum(paid) / len(paid)
        paid = [reward - mean for reward in paid]
    samples = list(group.samples)
    for i, reward in zip(in_scope, paid, strict=True):
        samples[i] = samples[i].with_reward_part("ranking", reward)
    return replace(group, samples=tuple(samples)), len(paid)


def _weighted(mixed: Sequence[MixedGroup], settings: MethodSettings) -> Iterator[WeightedSample]:
    kept = [[not (settings.mask_truncated and s.truncated) for s in m.members] for m in mixed]
    counted = [(m, keep) for m, keep in zip(mixed, kept, strict=True) if any(keep)]
    base = _base(counted, settings.objective)
    tokens = sum(len(s.tokens) for m, keep in base for s, k in zip(m.members, keep, strict=True) if k)
    for m, keep in counted:
        members = sum(keep)
        for i, (sample, advantage, k) in enumerate(zip(m.members, m.advantages, keep, strict=True)):
            if k and advantage != 0.0:
                weight = token_weight(len(sample.tokens), len(base), members, tokens, settings.objective)
                yield from _under_prompts(
                    m.group, sample, advantage, weight, i >= len(keep) - len(m.replay.samples), settings
                )


def _base(counted: _Counted, objective: ObjectiveSettings) -> _Counted:
    """The groups that the loss is a mean over: all, or one a query, the plain one."""
    plain = [(m, keep) for m, keep in counted if m.group.context.kind == "plain"]
    return plain if plain and objective.mean_over == "queries" else counted


def token_weight(length: int, groups: int, members: int, tokens: int, objective: ObjectiveSettings) -> float:
    """What one token of a sample of `length` tokens weighs, in a batch of `groups` groups and `tokens` tokens.

    >>> [token_weight(10, 2, 5, 400, ObjectiveSettings(name=n)) for n in ("grpo", "dapo")]  # 1/(2·5·10), 1/400
    [0.01, 0.0025]
    """
    if objective.normalise == "token":
        return 1.0 / tokens
    per_sequence = objective.constant if objective.normalise == "constant" else length
    return 1.0 / (groups * members * per_sequence)


def _under_prompts(
    group: Group, sample: Sample, advantage: float, weight: float, replayed: bool, settings: MethodSettings
) -> tuple[WeightedSample, ...]:
    """The sample under the prompt(s) it is trained with: its group's, or for reflection answers as settings say."""
    if replayed:
        moved = sample.context.kind != group.context.kind
        return (WeightedSample(group.prompt, sample, advantage, weight, "replayed", moved),)
    if group.context.kind == "plain":
        return (WeightedSample(group.prompt, sample, advantage, weight, "fresh"),)
    train_as = settings.reflection.train_as
    if train_as == "reflection":
        return (WeightedSample(group.prompt, sample, advantage, weight, "reflection"),)
    if group.plain_prompt is None:
        raise ValueError(f"train_as={train_as} needs the plain prompt of the reflection group of {group.query.id!r}")
    if train_as == "plain":
        return (WeightedSample(group.plain_prompt, sample, advantage, weight, "reflection", True),)
    return (
        WeightedSample(group.prompt, sample, advantage, weight / 2, "reflection"),
        WeightedSample(group.plain_prompt, sample, advantage, weight / 2, "reflection", True),
    )


def _counts(mixed: Sequence[MixedGroup], weighted: Sequence[WeightedSample], version: int) -> dict[str, float]:
    """How often each mechanism acted, and why not where it did not."""
    reasons = Counter(m.replay.reason for m in mixed)
    plain = [m for m in mixed if m.group.context.kind == "plain"]
    ages = [version - s.policy_version for m in mixed for s in m.replay.samples]
    counts: dict[str, float] = {
        "groups": len(mixed),
        "groups/plain": len(plain),
        "groups/reflection": len(mixed) - len(plain),
        "groups/solve_none": sum(m.group.solve_none for m in plain),
        "groups/solve_all": sum(m.group.solve_all for m in plain),
        "groups/teaching": sum(m.teaches for m in mixed),
        "replay/samples": len(ages),
        "replay/cross_context": sum(s.context.kind == "reflection" for m in mixed for s in m.replay.samples),
        "replay/age_mean": float(np.mean(ages)) if ages else 0.0,
        "replay/age_max": max(ages, default=0),
        "ranking/groups": sum(m.ranked > 0 for m in mixed),
        "ranking/samples": sum(m.ranked for m in mixed),
        "reflection/solved": sum(any(m.group.outcomes) for m in mixed if m.group.context.kind == "reflection"),
        "samples/trained": len(weighted),
        "samples/skipped": sum(a == 0.0 for m in mixed for a in m.advantages),
    }
    for reason in ("joined", "no_history", "too_old", "mixed", "reflection", "off"):
        counts[f"replay/{reason}"] = reasons[reason]
    return counts
