"""What a step asks of the buffer: past failures to reflect on (ISR), and past samples that may join a group (CCR).

Every trainer, ours and the adapters of others, asks through these two functions, so that all read the same history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3.buffer import SampleBuffer
from r3.method.reflection import Reflection, ReflectionReason, Tokenizer, hardness, in_vain, reflect
from r3.method.replay import wanted_outcome
from r3.method.settings import ReflectionSettings, ReplaySettings
from r3.samples import ContextKind, Group, Query, Sample
from r3.train.sampler import seed_of


def reflections(
    buffer: SampleBuffer,
    batch: Sequence[tuple[Query, int]],
    tokenizer: Tokenizer,
    settings: ReflectionSettings,
    *,
    seed: str,
) -> tuple[list[tuple[int, Reflection]], dict[str, int]]:
    """The reflection prompts of the batch's hard queries, each with its place in the batch; and how often why not.

    `batch` pairs queries with the epoch they are met in; the failures shown are drawn by `seed` and the query's id.
    """
    rates = buffer.success_rate([query.id for query, _ in batch]) if settings.enabled else {}
    reasons = [hardness(rates.get(query.id), epoch, settings) for query, epoch in batch]
    reasons = _without_lost_causes(buffer, batch, reasons, settings)
    hard = [place for place, reason in enumerate(reasons) if reason == "built"]
    ids = [batch[place][0].id for place in hard]
    failures = buffer.history(ids, outcome=False, limit=settings.candidates) if hard else {}
    counts: dict[str, int] = {reason: reasons.count(reason) for reason in set(reasons) - {"built"}}
    built = []
    for place in hard:
        query = batch[place][0]
        rng = np.random.default_rng(seed_of(f"{seed}/{query.id}/reflect"))
        made = reflect(query, failures[query.id], tokenizer, settings, rng=rng)
        counts[made.reason] = counts.get(made.reason, 0) + 1
        if made.prompt is not None:
            built.append((place, made))
    return built, counts


def _without_lost_causes(
    buffer: SampleBuffer,
    batch: Sequence[tuple[Query, int]],
    reasons: list[ReflectionReason],
    settings: ReflectionSettings,
) -> list[ReflectionReason]:
    """The reasons, with 'given_up' for hard queries that reflection has not helped so far."""
    if settings.give_up_after is None:
        return reasons
    hard = [query.id for (query, _), reason in zip(batch, reasons, strict=True) if reason == "built"]
    lost = {
        query_id
        for query_id, past in buffer.attempts(hard, context="reflection").items()
        if in_vain(past.tried, past.solved, settings)
    }
    return [
        "given_up" if reason == "built" and query.id in lost else reason
        for (query, _), reason in zip(batch, reasons, strict=True)
    ]


def past_samples(
    buffer: SampleBuffer, groups: Sequence[Group], settings: ReplaySettings, version: int
) -> dict[str, list[Sample]]:
    """Past samples of the opposite outcome for every homogeneous group, as far as the age cap reaches."""
    since = None if settings.max_age is None else version - settings.max_age
    found: dict[str, list[Sample]] = {}
    for outcome in (True, False):
        ids = [group.query.id for group in groups if wanted_outcome(group, settings) is outcome]
        for query_id, samples in _read(buffer, ids, outcome, since, settings).items():
            found.setdefault(query_id, []).extend(samples)
    return found


def _read(
    buffer: SampleBuffer, ids: Sequence[str], outcome: bool, since: int | None, settings: ReplaySettings
) -> dict[str, list[Sample]]:
    if not ids:
        return {}
    context: ContextKind | None = None if outcome else "plain"  # a failure in reflection does not join (`replay`)
    young = buffer.history(
        ids,
        outcome=outcome,
        limit=settings.candidates,
        context=context,
        since_version=since,
        distinct=settings.distinct,
    )
    # One older sample where no young one is: it will not join, but the metrics can say that age was the reason.
    bare = [query_id for query_id, samples in young.items() if not samples] if since is not None else []
    older = buffer.history(bare, outcome=outcome, limit=1, context=context) if bare else {}
    return {**young, **older}
