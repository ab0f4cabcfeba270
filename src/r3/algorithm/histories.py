"""Which past answers may join a step's groups: of the buffer, of an earlier run, of this very step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from r3.buffer import SampleBuffer
from r3.method.replay import by_age, wanted_outcomes
from r3.method.settings import MethodSettings
from r3.samples import ContextKind, Group, Joins, Sample

Joined = Mapping[str, Mapping[bytes, Joins]]
"""How past answers fared in replay, by query and fingerprint."""


class Histories:
    """Reads the past samples that CCR chooses from."""

    def __init__(self, settings: MethodSettings, buffer: SampleBuffer, earlier: SampleBuffer | None) -> None:
        self.settings, self.replay, self.buffer, self.earlier = settings, settings.replay, buffer, earlier

    def of(self, groups: Sequence[Group], version: int, joins: Joined) -> dict[str, list[Sample]]:
        """Past samples of the outcomes that each group lacks (or of all), as far as the age cap reaches."""
        past: dict[str, list[Sample]] = {}
        for outcome in (True, False):
            ids = [g.query.id for g in groups if outcome in wanted_outcomes(g, self.replay)]
            for query_id, samples in self._candidates(ids, outcome, version, joins).items():
                past.setdefault(query_id, []).extend(samples)
        if self.replay.when in ("always", "revisited"):  # the newest of both outcomes together
            past = {q: sorted(s, key=by_age, reverse=True)[: self.replay.candidates] for q, s in past.items()}
        for query_id, samples in self._just_reflected(groups).items():
            past.setdefault(query_id, []).extend(samples)
        return past

    def _just_reflected(self, groups: Sequence[Group]) -> dict[str, list[Sample]]:
        """Right reflection answers of this very step, for the plain groups of their queries that solved none."""
        if not (self.settings.reflection.enabled and self.settings.reflection.at_once):
            return {}
        stuck = {g.query.id for g in groups if g.solve_none and wanted_outcomes(g, self.replay)}
        right: dict[str, list[Sample]] = {}
        for group in groups:
            if group.context.kind == "reflection" and group.query.id in stuck:
                right.setdefault(group.query.id, []).extend(sample for sample in group.samples if sample.outcome)
        return right

    def _candidates(self, ids: Sequence[str], outcome: bool, version: int, joins: Joined) -> dict[str, list[Sample]]:
        if not ids:
            return {}
        settings = self.replay
        since = None if settings.max_age is None else version - settings.max_age
        context: ContextKind | None = None if outcome else "plain"  # a failure in reflection does not join (`replay`)
        young = self.buffer.history(
            ids,
            outcome=outcome,
            limit=settings.candidates,
            context=context,
            since_version=since,
            distinct=settings.distinct,
            joined_below=settings.max_repeats,
        )
        # One other sample where none fits: it will not join, but the metrics can say that age or use was the reason.
        bounded = since is not None or settings.max_repeats is not None
        bare = [query_id for query_id, samples in young.items() if not samples] if bounded else []
        older = self.buffer.history(bare, outcome=outcome, limit=1, context=context) if bare else {}
        found = {**young, **older}
        return self._with_earlier(found, joins) if outcome else found

    def _with_earlier(self, found: dict[str, list[Sample]], joins: Joined) -> dict[str, list[Sample]]:
        """The successes, filled up with those of the earlier run, which count as drawn before this one's first update.

        They have no ids, since those of two buffers would clash.
        """
        if self.earlier is None:
            return found
        settings = self.replay
        most = settings.candidates
        few = [query_id for query_id, samples in found.items() if len(samples) < most]
        used_up = {q: _used_up(joins.get(q, {}), settings.max_repeats) for q in few}
        limit = most + max(map(len, used_up.values()), default=0)  # the used-up ones may be the newest
        before = self.earlier.history(few, outcome=True, limit=limit, context="plain", distinct=settings.distinct)
        as_new = {
            q: [
                replace(s, policy_version=0, step=0, id=None)
                for s in before.get(q, [])
                if s.fingerprint not in used_up[q]
            ]
            for q in found
        }
        return {q: [*samples, *as_new[q]][:most] for q, samples in found.items()}


def _used_up(joins: Mapping[bytes, Joins], most: int | None) -> set[bytes]:
    return set() if most is None else {text for text, past in joins.items() if past.times >= most}
