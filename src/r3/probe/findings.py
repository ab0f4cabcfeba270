"""The numbers computed from the drawn answers: the content of `probe.json`.

The estimates below go from counts by query to numbers with intervals. Intervals resample queries, not answers: answers
to the same query are alike. With 2G answers to a query, c of them right, the chances of a group of G are exact averages
over all ways to deal them into two groups, which are steadier than the two groups as they happened to fall.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.evaluate.passk import Estimate, estimate, pass_at_k, student, wilson
from r3.method.ranking import dominance_scores, late_pairs, ordered_pairs, structure
from r3.probe.draw import Drawn, Late
from r3.samples import Group, Sample

SERR = "SERR's order"


@dataclass(frozen=True, slots=True)
class Lift:
    """Reflection answers against further plain answers to the same queries, none of them solved before."""

    queries: int
    answers: int
    """How many answers of each kind."""
    plain: Estimate
    reflection: Estimate
    ratio: Estimate
    right: tuple[int, int]
    """Right plain answers, right reflection answers."""
    tokens_per_right: tuple[float | None, float | None]
    """Tokens per right answer, plain and under reflection; None without a right one."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whether an order of a query's truncated answers tells which of them finish right: AUC over pairs of a query."""

    auc: Mapping[str, Estimate]
    pairs: int
    queries: int
    """Queries with an answer that finishes right and one that does not."""
    at_half: Estimate | None
    """The AUC of SERR's order if answers were cut at half the limit, from the plain answers alone."""
    pairs_at_half: int
    queries_at_half: int


@dataclass(frozen=True, slots=True)
class Limit:
    """What a doubled length limit would change."""

    carried_on: int
    finish_right: Estimate | None
    """Share of truncated answers that are right at twice the limit, in the groups that every query got."""
    accuracy: float | None
    """Accuracy of all plain answers at twice the limit."""
    no_room: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that a probe found."""

    queries: int
    group_size: int
    limit: int
    solve: Mapping[str, Estimate]
    """Shares of groups that solve none, all, or are mixed."""
    pass_at: Mapping[int, Estimate]
    replay: Mapping[str, Estimate]
    """Shares of queries whose second group solves none (all) while the first has a success (failure) to join it."""
    truncated: Estimate
    lengths: Mapping[str, float | None]
    reasons: Mapping[str, int]
    hard: int
    refused: Mapping[str, int]
    lift: Lift | None
    ranking: Ranking
    at_twice: Limit

    @property
    def answers(self) -> int:
        return sum(self.reasons.values())


def measure(drawn: Drawn, limit: int, *, peak_fraction: float, seed: int) -> Findings:
    """The same answers and seed give the same numbers."""
    group = len(drawn.plain[0][0])
    right = [sum(a.outcomes) + sum(b.outcomes) for a, b in drawn.plain]

    def over_queries(score: Callable[[int], float]) -> Estimate:
        return estimate([score(count) for count in right], seed=seed)

    answers = [sample for pair in drawn.plain for drawn_group in pair for sample in drawn_group.samples]
    cut = [sum(s.truncated for s in (*a.samples, *b.samples)) / (2 * group) for a, b in drawn.plain]
    pass_at = {
        k: over_queries(lambda count, k=k: pass_at_k(2 * group, count, k))  # type: ignore[misc]
        for k in powers_up_to(group)
    }
    truncated = estimate(cut, seed=seed)
    return Findings(
        queries=len(drawn.plain),
        group_size=group,
        limit=limit,
        solve={
            "none": over_queries(lambda count: none_right(count, group)),
            "mixed": over_queries(lambda count: 1 - none_right(count, group) - all_right(count, group)),
            "all": over_queries(lambda count: all_right(count, group)),
        },
        pass_at=pass_at,
        replay={
            "success": over_queries(lambda count: to_replay(count, group)),
            "failure": over_queries(lambda count: to_replay(2 * group - count, group)),
        },
        truncated=truncated,
        lengths=_lengths(answers),
        reasons=dict(Counter(sample.reason for sample in answers).most_common()),
        hard=drawn.hard,
        refused=dict(drawn.refused),
        lift=_lift(drawn, seed),
        ranking=_ranking(drawn, limit, peak_fraction),
        at_twice=_at_twice(drawn, pass_at[1].value, truncated.value),
    )


def _lengths(answers: Sequence[Sample]) -> dict[str, float | None]:
    of_all = [len(sample) for sample in answers]
    of_right = [len(sample) for sample in answers if sample.outcome]
    return {
        "mean": float(np.mean(of_all)),
        "median": float(np.median(of_all)),
        "mean_right": float(np.mean(of_right)) if of_right else None,
    }


def _lift(drawn: Drawn, seed: int) -> Lift | None:
    """Each query's groups of a kind, joined."""
    if not drawn.lift:
        return None
    sides = [_by_query(pair[kind] for pair in drawn.lift) for kind in (0, 1)]
    tried = [len(samples) for samples in sides[0].values()]
    right = [[sum(bool(sample.outcome) for sample in samples) for samples in side.values()] for side in sides]
    tokens = [sum(len(sample) for samples in side.values() for sample in samples) for side in sides]
    per_right = [spent / sum(hits) if any(hits) else None for spent, hits in zip(tokens, right, strict=True)]
    plain, reflection = (share(hits, tried) for hits in right)
    assert plain is not None
    assert reflection is not None
    return Lift(
        queries=len(tried),
        answers=sum(tried),
        plain=plain,
        reflection=reflection,
        ratio=ratio(right[1], right[0], tried, seed=seed),
        right=(sum(right[0]), sum(right[1])),
        tokens_per_right=(per_right[0], per_right[1]),
    )


def _by_query(groups: Iterable[Group]) -> dict[str, list[Sample]]:
    answers: dict[str, list[Sample]] = {}
    for group in groups:
        answers.setdefault(group.query.id, []).extend(group.samples)
    return answers


def _ranking(drawn: Drawn, limit: int, peak_fraction: float) -> Ranking:
    by_query: dict[str, list[Late]] = {}
    for late in drawn.late:
        by_query.setdefault(late.sample.query_id, []).append(late)
    orders: dict[str, list[tuple[float, int]]] = {}
    for lates in by_query.values():
        right = [late.right for late in lates]
        for name, scores in _scores([late.sample for late in lates], peak_fraction).items():
            orders.setdefault(name, []).append(ordered_pairs(scores, right))
    auc = {name: _auc(pairs) for name, pairs in orders.items()}
    counted = next(iter(orders.values()), [])
    halves = [
        late_pairs(
            [s.entropies for s in samples if s.entropies is not None],
            [bool(s.outcome) for s in samples if s.entropies is not None],
            limit=limit,
            peak_fraction=peak_fraction,
        )
        for samples in _by_query(drawn.plain_groups).values()
    ]
    return Ranking(
        auc={name: area for name, area in auc.items() if area is not None},
        pairs=sum(of for _, of in counted),
        queries=sum(of > 0 for _, of in counted),
        at_half=_auc(halves),
        pairs_at_half=sum(of for _, of in halves),
        queries_at_half=sum(of > 0 for _, of in halves),
    )


def _scores(samples: Sequence[Sample], peak_fraction: float) -> dict[str, Sequence[float]]:
    """Scores of truncated answers that need no verifier; higher is better."""
    scores: dict[str, Sequence[float]] = {}
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    if len(entropies) == len(samples):
        peaks, wholes = structure(entropies, peak_fraction=peak_fraction)
        scores[SERR] = dominance_scores(peaks, wholes).tolist()
        scores["high peak entropy"] = peaks.tolist()
        scores["low global entropy"] = (-wholes).tolist()
    scores["mean log-prob"] = [float(sample.logprobs.mean(dtype=np.float64)) for sample in samples]
    scores["shortness"] = [-len(sample) for sample in samples]
    return scores


def _auc(pairs: Sequence[tuple[float, int]]) -> Estimate | None:
    return share([in_order for in_order, _ in pairs], [of for _, of in pairs])


def _at_twice(drawn: Drawn, accuracy: float, truncated: float) -> Limit:
    of_all = [late for late in drawn.late if late.of_all]  # only hard queries have further answers
    tried: Counter[str] = Counter(late.sample.query_id for late in of_all)
    right: Counter[str] = Counter(late.sample.query_id for late in of_all if late.right)
    finish_right = share([right[i] for i in tried], list(tried.values()))
    at_twice = None if finish_right is None else accuracy + truncated * finish_right.value
    return Limit(len(drawn.late), finish_right, at_twice, drawn.no_room)


def as_dict(value: Any) -> Any:
    """The findings in JSON's types."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_dict(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): as_dict(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [as_dict(inner) for inner in value]
    return value


Array = npt.NDArray[np.float64]
RESAMPLES = 5_000
FEWEST_QUERIES = 8
"""With fewer queries than this a share of pairs has no interval: a bootstrap would say too little."""


def none_right(right: int, group: int) -> float:
    """Chance that a group of G solves none, given how many of 2G answers are right.

    >>> none_right(1, 2), none_right(0, 2), none_right(3, 2)
    (0.5, 1.0, 0.0)
    """
    return 1.0 - pass_at_k(2 * group, right, group)


def all_right(right: int, group: int) -> float:
    """Chance that a group of G solves all, given the same.

    >>> all_right(3, 2), all_right(4, 2)
    (0.5, 1.0)
    """
    return none_right(2 * group - right, group)


def to_replay(right: int, group: int) -> float:
    """Chance that a second group solves none and the first has a success that could join it.

    >>> to_replay(0, 2), to_replay(1, 2), round(to_replay(2, 2), 3)
    (0.0, 0.5, 0.167)
    """
    return none_right(right, group) if right else 0.0


def ratio(first: Sequence[int], second: Sequence[int], answers: Sequence[int], *, seed: int) -> Estimate:
    """How many times as often the first side is right, from the right answers per query on either side.

    Either side gets half a success more than it had, so that there is a ratio where one had none. A side that was
    never right would not vary when it is drawn again; its rate is drawn from Jeffreys' Beta(½, answers + ½) instead.
    """
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(answers), (RESAMPLES, len(answers)))
    answers_Q = np.asarray(answers, np.float64)
    drawn = answers_Q[draws].sum(1)

    def side(right: Sequence[int]) -> tuple[float, Array]:
        right_Q = np.asarray(right, np.float64)
        rate = (float(right_Q.sum()) + 0.5) / float(answers_Q.sum())
        if not right_Q.any():
            return rate, rng.beta(0.5, answers_Q.sum() + 0.5, RESAMPLES)
        return rate, (right_Q[draws].sum(1) + 0.5) / drawn

    (top, tops), (bottom, bottoms) = side(first), side(second)
    low, high = np.quantile(tops / np.maximum(bottoms, 1e-12), [0.025, 0.975])
    return Estimate(top / bottom, float(low), float(high))


def share(parts: Sequence[float], wholes: Sequence[float]) -> Estimate | None:
    """Σ parts / Σ wholes, with an interval over the queries that they belong to; None without any.

    Wilson's interval for as many independent answers as would have the ratio's standard error over queries, with
    Student's t in place of 1.96 (Korn and Graubard, 1998). Queries count by their weight (Kish): where a few hold most
    of the answers there are few. With fewer than `FEWEST_QUERIES` the interval is all of [0, 1].
    """
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole]
    if not pairs:
        return None
    part_Q, whole_Q = np.array(pairs, np.float64).T
    value = float(part_Q.sum() / whole_Q.sum())
    effective = float(whole_Q.sum() ** 2 / (whole_Q**2).sum())
    if effective < FEWEST_QUERIES:
        return Estimate(value, 0.0, 1.0)
    residual_Q = part_Q - value * whole_Q
    error = math.sqrt(effective / (effective - 1) * float((residual_Q**2).sum())) / float(whole_Q.sum())
    reach = student(round(effective) - 1, 0.975)
    if 0.0 < value < 1.0 and error == 0.0:  # every query has the same share
        return Estimate(value, value, value)
    answers = value * (1 - value) / error**2 if error else effective
    low, high = wilson(value * answers, answers, reach)
    return Estimate(value, min(low, value), max(high, value))


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, … and the last.

    >>> powers_up_to(8), powers_up_to(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({*(2**i for i in range(int(math.log2(most)) + 1)), most})
