"""CCR, cross-context replay: which of a query's own past answers join its group.

    all wrong (solve-none)  → up to k past right answers of the same query
    all right (solve-all)   → up to k past wrong ones
    mixed                   → none: the group already teaches

Other methods replay more freely: `when: solve_none` leaves all-right groups alone, `when: always` lets past answers
join any plain group (RePO, RLEP), whatever its outcomes, `when: revisited` those of queries that the sampler asked
before their turn (ExGRPO).

Departures from the paper, and choices it leaves open:
- Homogeneity is decided on right/wrong, never on the shaped reward, which differs even among right answers.
- Samples older than `max_age` updates stay out: very old data costs more than it teaches.
- Different texts come first; a repeated text joins only where fewer than k different ones exist. Replaying one easy
  success over and over is how modes collapse. (`distinct` = false takes them as they come.)
- An answer may join so many times and no more (`max_repeats`): where nothing else bounds its pull, its number does. It
  is counted by its text, so that writing it again starts no new count.
- Newest first by default; `random` draws from the given history with a generator seeded by the caller;
  `lowest_entropy` goes by the entropies at sampling time, `max_variance` (RePO) takes the k whose rewards differ most.
- A right answer first found in reflection may join a plain group ("cross-context"); a wrong one may not. What the
  policy does wrong with an attempt before its eyes is not what it does wrong without, and no clip bounds how often it
  would be pushed away, since nothing tells how likely it was under the plain prompt. (`ratio` = first_replayed keeps
  how likely a success was when it was first replayed there, and bounds its repetition by that.)
- Reflection groups take no replay: their prompt shows a past attempt, which answers to other prompts do not answer.
  Nor do hinted ones, nor a group whose place a hinted one took.
- A replayed wrong answer comes back with the reward of its outcome alone: a ranking reward compared it with the
  group it was drawn in, and means nothing in another.
- The outcome of the decision is a `Replay` with a reason, which the metrics count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from r3.method.settings import ReplaySettings
from r3.samples import Group, Joins, Sample

ReplayReason = Literal["joined", "off", "mixed", "reflection", "no_history", "too_old", "too_few", "used_up", "helped"]


@dataclass(frozen=True, slots=True)
class Replay:
    """The past samples that join a group, and why there are none if there are none."""

    samples: tuple[Sample, ...]
    reason: ReplayReason


def wanted_outcomes(group: Group, settings: ReplaySettings) -> tuple[bool, ...]:
    """The outcomes to look for in the history: right for solve-none, wrong for solve-all, none for nothing to do."""
    if not settings.enabled or group.context.kind != "plain":
        return ()
    if settings.when == "always" or (settings.when == "revisited" and group.revisited):
        return (True, False) if settings.failures else (True,)
    if settings.when == "revisited":
        return ()
    if group.solve_none:
        return (True,)
    return (False,) if group.solve_all and settings.failures and settings.when == "homogeneous" else ()


def choose_replay(
    group: Group,
    history: Sequence[Sample],
    settings: ReplaySettings,
    *,
    policy_version: int,
    joins: Mapping[bytes, Joins] | None = None,
    rng: np.random.Generator | None = None,
) -> Replay:
    """The members of `history` (this query's past, in any order) that join `group`.

    `policy_version` is that of the policy about to be trained; `joins` says by fingerprint how often past answers have
    joined before, for max_repeats; `rng` is needed for order = random.
    """
    wanted = wanted_outcomes(group, settings)
    if not wanted:
        return Replay((), _why_not(group, settings))
    for sample in history:
        if sample.query_id != group.query.id:
            raise ValueError(f"history of query {group.query.id!r} holds a sample of query {sample.query_id!r}")
    fitting = [s for s in history if s.outcome in wanted and (s.outcome or s.context.kind == "plain")]
    if not fitting:
        return Replay((), "no_history")
    young = [sample for sample in fitting if is_young(sample, settings, policy_version)]
    if not young:
        return Replay((), "too_old")
    if len(young) < settings.min_history:
        return Replay((), "too_few")
    if settings.order == "max_variance":
        varied = _most_varied(_not_used_up(young, settings.max_repeats, joins or {}), settings)
        return Replay(varied, "joined" if varied else "used_up")
    ordered = _ordered(young, settings, rng)
    chosen = _distinct_first(ordered) if settings.distinct else ordered
    left = _not_used_up(chosen, settings.max_repeats, joins or {})
    return Replay(tuple(left[: settings.k]), "joined" if left else "used_up")


def is_young(sample: Sample, settings: ReplaySettings, policy_version: int) -> bool:
    """Whether the sample is within the age cap."""
    return settings.max_age is None or policy_version - sample.policy_version <= settings.max_age


def outcome_reward(sample: Sample) -> float:
    """The sample's reward without what a ranking within its old group added."""
    return sample.reward - sample.reward_parts.get("ranking", 0.0)


def _why_not(group: Group, settings: ReplaySettings) -> ReplayReason:
    if not settings.enabled:
        return "off"
    if group.context.kind != "plain":
        return "reflection" if group.context.kind == "reflection" else "helped"
    return "off" if group.solve_all or settings.when == "revisited" else "mixed"


def _ordered(samples: list[Sample], settings: ReplaySettings, rng: np.random.Generator | None) -> list[Sample]:
    newest = sorted(samples, key=by_age, reverse=True)
    if settings.order == "newest":
        return newest
    if settings.order == "lowest_entropy":
        return sorted(newest, key=_mean_entropy)
    if settings.order == "highest_reward":
        return sorted(newest, key=outcome_reward, reverse=True)
    if rng is None:
        raise ValueError("order = random needs a seeded generator: pass rng=numpy.random.default_rng(seed)")
    return [newest[i] for i in rng.permutation(len(newest))]


def _most_varied(samples: list[Sample], settings: ReplaySettings) -> tuple[Sample, ...]:
    """The k whose rewards have the largest variance, which are some of the lowest and some of the highest; newer ones
    of equal rewards first. Where k different texts exist, no text is there twice (`distinct`)."""
    if not samples:
        return ()
    newest = sorted(samples, key=by_age, reverse=True)
    if settings.distinct:
        first = _distinct_first(newest)
        different = len({sample.tokens.tobytes() for sample in first})
        newest = first[: max(different, settings.k)]
    k = min(settings.k, len(newest))
    rewards_N = [outcome_reward(sample) for sample in newest]
    lowest = sorted(range(len(newest)), key=rewards_N.__getitem__)
    highest = sorted(range(len(newest)), key=rewards_N.__getitem__, reverse=True)
    rewards = sorted(rewards_N)

    def spread(low: int) -> float:
        return float(np.var(rewards[:low] + rewards[len(rewards) - (k - low) :]))

    # The most even split among equal spreads: rewards that are all alike would else come from one end.
    low = max(range(k + 1), key=lambda low: (round(spread(low), 12), -abs(2 * low - k)))
    right = highest[: k - low]
    wrong = [index for index in lowest if index not in right][:low]
    return tuple(newest[index] for index in (*right, *wrong))


def by_age(sample: Sample) -> tuple[int, int, int]:
    """Rises with time: ids do, and samples that were never stored fall back on their policy version and step."""
    return sample.policy_version, sample.step, -1 if sample.id is None else sample.id


def _mean_entropy(sample: Sample) -> float:
    if sample.entropies is None:
        raise ValueError(
            f"replay.order=lowest_entropy needs entropies, and a past sample of query {sample.query_id!r} has none"
        )
    return float(sample.entropies.mean(dtype=np.float64))


def _not_used_up(samples: list[Sample], most: int | None, joins: Mapping[bytes, Joins]) -> list[Sample]:
    """Those that may join once more, each in turn counted like the ones before."""
    if most is None:
        return samples
    left: list[Sample] = []
    now: Counter[bytes] = Counter()
    for sample in samples:
        text = sample.fingerprint
        before = joins[text].times if text in joins else 0
        if before + now[text] < most:
            left.append(sample)
            now[text] += 1
    return left


def _distinct_first(samples: list[Sample]) -> list[Sample]:
    seen: set[bytes] = set()
    first: list[Sample] = []
    again: list[Sample] = []
    for sample in samples:
        text = sample.tokens.tobytes()
        (again if text in seen else first).append(sample)
        seen.add(text)
    return first + again
