"""Algorithm 1 from a batch's verified rollouts to weighted samples: one pure function, `step`.

For every group, in the paper's order: rank the truncated answers of a solve-none group (SERR), let history of the
opposite outcome join a homogeneous one (CCR), take Eq. 3's advantages over what is then the group, and give each
sample the weight its tokens have in the loss. Groups that are still homogeneous may teach by themselves
(`zvp`, `lens_advantages`, `signed`). The trainer that follows is blind to the method: it sees prompts,
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
- In a group that solved all, right answers differ by their length bonus alone, and Eq. 1 makes a few hundredths of a
  reward as large as right and wrong are elsewhere; two past failures among eight right answers get −2 each.
  `advantage.solve_all` = unscaled leaves such groups at the size of their rewards.
- `mask_truncated` takes truncated samples out of the loss and out of its denominators, not out of the baseline.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from r3.method.advantage import (
    confidence,
    group_advantages,
    lens_advantages,
    lens_rewards,
    less_their_mean,
    over_batch,
    signed,
    zvp,
)
from r3.method.distill import Teacher, distilled
from r3.method.help import Demonstrations, Help, help_of
from r3.method.mixed import (
    Member,
    MixedGroup,
    Origin,
    StepResult,
    WeightedSample,
    is_mixed,
    outcomes_differ,
    times_counted,
    weighted,
)
from r3.method.ranking import annealed, structural_entropy_rewards
from r3.method.replay import ReplayReason, choose_replay, outcome_reward
from r3.method.settings import AdvantageSettings, MethodSettings, RankingSettings
from r3.samples import Group, Joins, Sample


def step(
    groups: Sequence[Group],
    settings: MethodSettings,
    *,
    history: Mapping[str, Sequence[Sample]] | None = None,
    joins: Mapping[str, Mapping[bytes, Joins]] | None = None,
    teacher: Teacher | None = None,
    demonstrations: Demonstrations | None = None,
    policy_version: int = 0,
    seed: int = 0,
) -> StepResult:
    """Turn a batch of verified groups and their queries' history into weighted samples.

    `joins` says how past answers fared in replay, by query and fingerprint, where the settings ask for it;
    `teacher` gives the log-probs of the answers that self-distillation teaches, `demonstrations` the judged answers
    from the data that may join plain groups.

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
    past, joined = history or {}, joins or {}
    help = help_of(groups, settings, demonstrations or {})
    mixed = tuple(
        _apart(group)
        if index in help.apart or index in help.replaced
        else _mix(
            group,
            past.get(group.query.id, ()),
            joined.get(group.query.id, {}),
            help.joining.get(index, ()),
            settings,
            policy_version,
            seed,
        )
        for index, group in enumerate(groups)
    )
    if settings.advantage.scale == "batch_std":
        mixed = _over_batch(mixed, settings)
    mixed = tuple(_by_itself(m, settings.advantage) for m in mixed)
    if not settings.ranking.alone and not any(m.teaches and not m.by_ranking_alone for m in mixed):
        mixed = tuple(_with_advantages(m, [0.0] * len(m.compared)) for m in mixed)
    mixed = distilled(mixed, teacher or {}, settings.distill)
    times = times_counted(mixed, settings.resample, np.random.default_rng([seed, policy_version, len(mixed)]))
    sequences = tuple(weighted(mixed, times, settings, joined))
    copies = {"resample/copies": sum(max(0, count - 1) for count in times)}
    counts = step_counts(mixed, sequences, policy_version) | help_counts(mixed, help, demonstrations or {})
    return StepResult(sequences, mixed, counts | copies)


def _apart(group: Group) -> MixedGroup:
    """A group whose answers are neither compared nor trained on where they are: another took its place, or it has none.

    A hinted group takes the place of the plain one; refinements are trained on in the group that they join.
    """
    members = tuple(Member(sample, sample.reward, 0.0, _drawn(group), left_out=True) for sample in group.samples)
    return MixedGroup(group, members, "helped", 0)


def _drawn(group: Group) -> Origin:
    return "fresh" if group.context.kind == "plain" else group.context.kind


def _mix(
    group: Group,
    history: Sequence[Sample],
    joins: Mapping[bytes, Joins],
    joining: Sequence[tuple[Sample, Origin]],
    settings: MethodSettings,
    version: int,
    seed: int,
) -> MixedGroup:
    fresh, ranked = _rank(group, settings, version)
    # Seeded by query, so that the choice does not depend on which other groups are in the batch.
    rng = None
    if settings.replay.order == "random":
        rng = np.random.default_rng([seed, version, zlib.crc32(group.query.id.encode())])
    replay = choose_replay(group, history, settings.replay, policy_version=version, joins=joins, rng=rng)
    # One fresh sample at least stays, or there would be nothing to compare the past ones with.
    replaced = min(len(replay.samples), len(fresh) - 1) if settings.replay.mode == "replace" else 0
    stay = len(fresh) - replaced
    others = (*((sample, "replayed") for sample in replay.samples), *joining)
    samples = (*fresh[:stay], *(sample for sample, _ in others))
    rewards = [sample.reward for sample in fresh[:stay]] + [outcome_reward(sample) for sample, _ in others]
    if settings.advantage.homogeneous == "lens" and outcomes_differ(samples):
        rewards = _lens_rewards(rewards, samples)
    parts = [slice(0, stay), slice(stay, None)] if settings.replay.baseline == "split" else [slice(None)]
    advantages: list[float] = []
    for part in parts:
        joined = bool(replay.samples) and part != slice(0, stay)
        unscaled = _is_unscaled(group, samples[part], settings, ranked=ranked > 0)
        advantages += _advantages(rewards[part], samples[part], settings, unscaled=unscaled, replayed=joined)
    drawn = _drawn(group)
    origins = [*[drawn] * stay, *(origin for _, origin in others)]
    members = list(map(Member, samples, rewards, advantages, origins))
    members[stay:stay] = [Member(sample, sample.reward, 0.0, drawn, left_out=True) for sample in fresh[stay:]]
    return MixedGroup(group, tuple(members), replay.reason, ranked)


def _advantages(
    rewards: Sequence[float], samples: Sequence[Sample], settings: MethodSettings, *, unscaled: bool, replayed: bool
) -> list[float]:
    """Eq. 3 or what the settings have in its place; a batch's standard deviation is divided by later."""
    options = settings.advantage
    if options.baseline == "sign":
        return _capped(signed([bool(sample.outcome) for sample in samples], options.right_weight), options.cap)
    scale, cap = options.scale, options.cap
    if scale == "batch_std":  # what it is divided by, only the whole batch tells (`_over_batch`)
        scale, cap = "none", None
    elif unscaled:
        scale = "none"
    return group_advantages(
        rewards,
        alpha=options.alpha if replayed else 1.0,
        eps=options.eps,
        scale=scale,
        baseline=options.baseline,
        cap=cap,
    )


def _is_unscaled(group: Group, samples: Sequence[Sample], settings: MethodSettings, *, ranked: bool) -> bool:
    """Whether the advantages of a group's samples are to stay at the size of their rewards."""
    if group.solve_all:
        return settings.advantage.solve_all == "unscaled"
    return ranked and not outcomes_differ(samples) and not settings.ranking.standardised


def _lens_rewards(rewards: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    return lens_rewards(rewards, [bool(s.outcome) for s in samples], [confidence(s.logprobs) for s in samples])


def _by_itself(mixed: MixedGroup, options: AdvantageSettings) -> MixedGroup:
    """The group as `advantage.homogeneous` has it, where nothing else tells its members apart."""
    compared = mixed.compared
    samples = [member.sample for member in compared]
    if options.homogeneous == "none" or mixed.group.context.kind != "plain":
        return mixed
    if mixed.ranked or outcomes_differ(samples):
        return mixed
    if options.homogeneous == "zvp":
        weighed = (m if m.left_out else _by_entropy(m, options) for m in mixed.members)
        return replace(mixed, members=tuple(weighed), by_itself=True)
    if options.homogeneous == "signed":
        advantages = signed([bool(sample.outcome) for sample in samples], options.right_weight)
        return replace(_with_advantages(mixed, _capped(advantages, options.cap)), by_itself=True)
    if mixed.group.solve_all:
        return mixed
    costs = _lens_rewards([member.reward for member in compared], samples)
    advantages = _capped(lens_advantages(costs, options.lens_weight), options.cap)
    given = iter(costs)
    priced = (m if m.left_out else replace(m, reward=next(given)) for m in mixed.members)
    return _with_advantages(replace(mixed, members=tuple(priced), by_itself=True), advantages)


def _by_entropy(member: Member, options: AdvantageSettings) -> Member:
    sample = member.sample
    if sample.entropies is None:
        raise ValueError(
            f"advantage.homogeneous=zvp needs entropies, and a sample of query {sample.query_id!r} has none"
        )
    weighed = zvp(sample.entropies, bool(sample.outcome), options.zvp_alpha)
    if options.cap is not None:
        weighed = weighed.clip(-options.cap, options.cap)
    return replace(member, advantage=float(weighed.mean()), token_advantages=weighed)


def _capped(advantages: Sequence[float], cap: float | None) -> list[float]:
    return [a if cap is None else max(-cap, min(cap, a)) for a in advantages]


def _over_batch(mixed: Sequence[MixedGroup], settings: MethodSettings) -> tuple[MixedGroup, ...]:
    """The groups with their centred rewards divided by the batch's standard deviation, where they are to be divided."""
    options = settings.advantage
    divided = [
        i
        for i, m in enumerate(mixed)
        if not _is_unscaled(m.group, [member.sample for member in m.compared], settings, ranked=m.ranked > 0)
    ]
    alphas = [options.alpha if mixed[i].replayed else 1.0 for i in divided]
    centred = [[member.advantage for member in mixed[i].compared] for i in divided]
    scaled = dict(zip(divided, over_batch(centred, alphas, eps=options.eps, cap=options.cap), strict=True))
    return tuple(_with_advantages(m, scaled[i]) if i in scaled else m for i, m in enumerate(mixed))


def _with_advantages(mixed: MixedGroup, advantages: Sequence[float]) -> MixedGroup:
    """The same with other advantages of those that are compared."""
    given = iter(advantages)
    members = (m if m.left_out else replace(m, advantage=next(given), token_advantages=None) for m in mixed.members)
    return replace(mixed, members=tuple(members))


def members_with_entropies(group: Group, settings: MethodSettings) -> list[int]:
    """Which of the group's samples `step` may ask for their entropies."""
    zvp_alike = settings.advantage.homogeneous == "zvp" and group.context.kind == "plain" and not is_mixed(group)
    return list(range(len(group))) if zvp_alike else ranked_members(group, settings.ranking)


def ranked_members(group: Group, settings: RankingSettings) -> list[int]:
    """Which of the group's samples SERR compares: the truncated (or failed) ones of a group that solved none."""
    if not settings.enabled or not group.solve_none or group.follows is not None:
        return []
    return [i for i, sample in enumerate(group.samples) if sample.truncated or settings.scope == "failed"]


def _rank(group: Group, settings: MethodSettings, version: int) -> tuple[tuple[Sample, ...], int]:
    """The group's samples with SERR added to those that it compares, and how many were ranked."""
    ranking, compared = settings.ranking, ranked_members(group, settings.ranking)
    entropies = [group.samples[i].entropies for i in compared]
    if any(h is None for h in entropies):
        raise ValueError(f"the ranking reward needs entropies, and samples of query {group.query.id!r} have none")
    paid = structural_entropy_rewards(
        [h for h in entropies if h is not None],
        peak_fraction=ranking.peak_fraction,
        max_reward=annealed(ranking.max_reward, version, ranking.anneal_updates),
    )
    if len(paid) < 2 or min(paid) == max(paid):
        return group.samples, 0
    if ranking.centred:
        paid = less_their_mean(paid)
    samples = list(group.samples)
    for i, reward in zip(compared, paid, strict=True):
        samples[i] = samples[i].with_reward_part("ranking", reward)
    return tuple(samples), len(paid)


# ------------------------------------------------------ counts for the metrics


def step_counts(mixed: Sequence[MixedGroup], weighted: Sequence[WeightedSample], version: int) -> dict[str, float]:
    """How often each mechanism acted, and why not where it did not."""
    reasons = Counter(m.replay for m in mixed)
    plain = [m for m in mixed if m.group.context.kind == "plain"]
    ages = [version - s.policy_version for m in mixed for s in m.replayed]
    counts: dict[str, float] = {
        "groups": len(mixed),
        "groups/plain": len(plain),
        "groups/reflection": sum(m.group.context.kind == "reflection" for m in mixed),
        "groups/solve_none": sum(m.group.solve_none for m in plain),
        "groups/solve_all": sum(m.group.solve_all for m in plain),
        "groups/teaching": sum(m.teaches for m in mixed),
        "replay/samples": len(ages),
        "replay/cross_context": sum(s.context.kind != "plain" for m in mixed for s in m.replayed),
        "replay/at_once": sum(s.step == m.group.samples[0].step for m in mixed for s in m.replayed),
        "replay/age_mean": float(np.mean(ages)) if ages else 0.0,
        "replay/age_max": max(ages, default=0),
        "homogeneous/groups": sum(m.by_itself for m in mixed),
        "ranking/groups": sum(m.ranked > 0 for m in mixed),
        "ranking/samples": sum(m.ranked for m in mixed),
        "reflection/solved": sum(any(m.group.outcomes) for m in mixed if m.group.context.kind == "reflection"),
        "samples/trained": len(weighted),
        "samples/skipped": sum(not member.teaches for m in mixed for member in m.members),
    }
    for reason in get_args(ReplayReason):
        counts[f"replay/{reason}"] = reasons[reason]
    return counts


def help_counts(mixed: Sequence[MixedGroup], help: Help, demonstrations: Demonstrations) -> dict[str, float]:
    """How often groups were helped, and with what success."""
    hinted = [m for m in mixed if m.group.context.kind == "hint"]
    refined = [m.group.outcomes for m in mixed if m.group.context.kind == "critique"]
    joined = Counter(member.origin for m in mixed for member in m.joined)
    return {
        "groups/hint": len(hinted),
        "hint/queries": len({m.group.follows for m in hinted}),
        "hint/solved": len(help.replaced),
        "groups/critique": len(refined),
        "critique/right": sum(map(any, refined)),
        "critique/joined": joined["critique"],
        "demonstration/joined": joined["demonstration"],
        "demonstration/wrong": sum(not sample.outcome for sample in demonstrations.values()),
    }
