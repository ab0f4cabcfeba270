"""The numbers computed from the drawn answers: the content of `probe.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.evaluate.passk import Estimate, estimate, pass_at_k
from r3.method.ranking import dominance_scores, late_pairs, ordered_pairs, structure
from r3.probe import estimates
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
        for k in estimates.powers_up_to(group)
    }
    truncated = estimate(cut, seed=seed)
    return Findings(
        queries=len(drawn.plain),
        group_size=group,
        limit=limit,
        solve={
            "none": over_queries(lambda count: estimates.none_right(count, group)),
            "mixed": over_queries(
                lambda count: 1 - estimates.none_right(count, group) - estimates.all_right(count, group)
            ),
            "all": over_queries(lambda count: estimates.all_right(count, group)),
        },
        pass_at=pass_at,
        replay={
            "success": over_queries(lambda count: estimates.to_replay(count, group)),
            "failure": over_queries(lambda count: estimates.to_replay(2 * group - count, group)),
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
    plain, reflection = (estimates.share(hits, tried) for hits in right)
    assert plain is not None
    assert reflection is not None
    return Lift(
        queries=len(tried),
        answers=sum(tried),
        plain=plain,
        reflection=reflection,
        ratio=estimates.ratio(right[1], right[0], tried, seed=seed),
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
    return estimates.share([in_order for in_order, _ in pairs], [of for _, of in pairs])


def _at_twice(drawn: Drawn, accuracy: float, truncated: float) -> Limit:
    of_all = [late for late in drawn.late if late.of_all]  # only hard queries have further answers
    tried: Counter[str] = Counter(late.sample.query_id for late in of_all)
    right: Counter[str] = Counter(late.sample.query_id for late in of_all if late.right)
    finish_right = estimates.share([right[i] for i in tried], list(tried.values()))
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
