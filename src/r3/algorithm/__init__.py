"""Algorithm 1 without a model: what to ask, and what to learn from the answers.

    asked  = algorithm.ask(batch, step=…)            a batch D_b: plain prompts, and reflection prompts of hard queries
    groups = [prompt.group(samples) for prompt …]    whoever generates answers every prompt G times and judges them
    result = algorithm.learn(groups, version=…)      replay, ranking, Eq. 3; what was answered joins the buffer S
    ...                                              train on result.weighted: prompt, tokens, advantage, weight

Our own loop and the trainers inside TRL and verl all go through these two calls, so that the order of Algorithm 1, and
what each of its lines reads from the buffer, is written down here and nowhere else. Methods that ask again in a step
(hints, refinements) say what with `algorithm.follow_up(prompts, groups)`, between the two, until it asks nothing more.

`Histories` says which past answers may join a step's groups: those of the buffer, of an earlier run, of this very step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from r3.algorithm.prompts import Asked, Batch, Helping, Prompt, Reflections
from r3.buffer import SampleBuffer
from r3.errors import ConfigError
from r3.method.distill import Lesson, Teacher, lessons_of
from r3.method.help import Demonstrations
from r3.method.mixed import StepResult, is_mixed
from r3.method.ranking import RankingGate
from r3.method.reflection import PlainPrompts, Tokenizer
from r3.method.replay import by_age, wanted_outcomes
from r3.method.settings import MethodSettings
from r3.method.step import members_with_entropies, step
from r3.samples import ContextKind, FloatArray, Group, Joins, Sample

__all__ = ["Algorithm", "Asked", "Prompt"]


class Algorithm:
    """Algorithm 1 of the paper, around whatever generates, judges and trains.

    Its only state is the buffer: the same seed, steps, batches and answers give the same results, and a run that
    resumes with its buffer rewound needs nothing else.
    """

    def __init__(
        self,
        settings: MethodSettings,
        buffer: SampleBuffer,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        earlier: SampleBuffer | None = None,
        prompts: PlainPrompts | None = None,
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.earlier = earlier
        """The buffer of an earlier run, whose successes may be replayed where this run has too few; it is only read."""
        self.tokenizer = tokenizer
        self.seed = seed
        self.prompts = PlainPrompts(tokenizer) if prompts is None else prompts
        """The plain prompts' tokens, which a caller that has tokenized the queries already can hand over."""
        self._reflections = Reflections(settings.reflection, buffer, tokenizer, seed=seed)
        self._histories = Histories(settings, buffer, earlier)
        self._helping = Helping(settings, tokenizer)
        self.gate = RankingGate(settings.ranking, buffer.late_pairs)

    # ---------------------------------------------------------------- ask

    def ask(self, batch: Batch, *, step: int, revisited: Collection[int] = ()) -> Asked:
        """The plain prompts of the batch's queries, and a second prompt for each hard one (ISR).

        `revisited` says by their positions which queries are asked before their turn.
        """
        plain = [replace(prompt, revisited=prompt.position in revisited) for prompt in self.plain_prompts(batch)]
        reflections, counts = self._reflections.prompts(plain, step)
        if self.settings.reflection.budget == "shared":
            halved = {prompt.position for prompt in reflections}
            plain = [replace(prompt, halved=prompt.position in halved) for prompt in plain]
        return Asked((*plain, *reflections), counts)

    def plain_prompts(self, batch: Batch) -> list[Prompt]:
        """Every query as it is."""
        return [
            Prompt(query, epoch, position, self.prompts(query), query.prompt)
            for position, (query, epoch) in enumerate(batch)
        ]

    def follow_up(self, asked: Sequence[Prompt], groups: Sequence[Group], *, step: int) -> list[Prompt]:
        """What to ask next, now that the prompts `asked` were answered by `groups`; nothing: the step can go on.

        Hints for queries that nobody solved, refinements of failures. To be called again with what came of it.
        """
        return self._helping.prompts(asked, groups, step=step)

    def missing(self, groups: Sequence[Group], queries: int) -> int:
        """How many of a batch's `queries` groups have no variance, for which resampling wants other queries (DAPO)."""
        resample = self.settings.resample
        if not resample.enabled or resample.fill == "copy":
            return 0
        return max(0, queries - sum(map(is_mixed, groups)))

    # ---------------------------------------------------------------- learn

    def lessons(self, groups: Sequence[Group]) -> list[Lesson]:
        """What self-distillation's teacher is to score before `learn`: fresh plain answers, each under its prompt."""
        settings = self.settings.distill
        if not settings.enabled:
            return []
        plain = [(number, group) for number, group in enumerate(groups) if group.context.kind == "plain"]
        bare = [group.query.id for _, group in plain if sum(group.outcomes) < 2] if settings.history else []
        past = self.buffer.history(bare, outcome=True, limit=1, context="plain") if bare else {}
        return [
            lesson
            for number, group in plain
            for lesson in lessons_of(number, group, past.get(group.query.id, ()), self.tokenizer, settings)
        ]

    def demonstrations(self, groups: Sequence[Group], *, version: int) -> dict[int, Sample]:
        """Right answers from the data, by the index of the group that each may join: to be judged before `learn`."""
        return self._helping.demonstrations(groups, version=version)

    def learn(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        teacher: Teacher | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> StepResult:
        """What to train on: ranking (SERR), replay (CCR) and Eq. 3 over the groups, whose samples then join S.

        `version` counts the optimiser updates behind the policy that answered. Every fresh sample of the result has
        the id under which the buffer now holds it. `teacher` has what it said of the `lessons`,
        `demonstrations` those that were judged.
        """
        settings = self._unranked() if self.gate.paused() else self.settings
        result = self._mixed(groups, settings, version, teacher, demonstrations)
        result = replace(result, counts={**result.counts, **self.gate.counts()})
        stored = result.stored_as(self.buffer.add(result.samples))  # S ← S ∪ D_b's responses
        if self._follows_replays and groups:
            self.buffer.note_joined(_step_of(result), [sample for mixed in result.groups for sample in mixed.replayed])
        if pairs := self.gate.pairs(groups):
            self.buffer.note_late_pairs(_step_of(result), pairs)
        return stored

    def first_replayed(self, result: StepResult, logprobs: Mapping[int, FloatArray]) -> None:
        """Keep the log-probs, by weighted sample, that those had at this step which were drawn under another prompt."""
        if self.settings.replay.ratio == "drawn":
            return
        replayed = [i for i, w in enumerate(result.weighted) if w.origin == "replayed" and w.recomputed]
        if replayed:
            self.buffer.keep_logprobs(_step_of(result), [(result.weighted[i].sample, logprobs[i]) for i in replayed])

    @property
    def _follows_replays(self) -> bool:
        """Whether the buffer is to say how past answers fared in replay."""
        replay = self.settings.replay
        return replay.enabled and (replay.max_repeats is not None or replay.ratio == "first_replayed")

    def preview(self, groups: Sequence[Group], *, version: int) -> StepResult:
        """What `learn` will let join the groups, for trainers that need to know before there are entropies.

        Members are those of `learn`; ranking rewards, and the advantages that hang on them, are still missing. Nothing
        is stored.
        """
        return self._mixed(groups, self._unranked(), version)

    def _unranked(self) -> MethodSettings:
        ranking = self.settings.ranking.model_copy(update={"enabled": False})
        return self.settings.model_copy(update={"ranking": ranking})

    def needs_entropies(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        """The samples, by group and member, whose entropies ranking or RL-ZVP will look at and which have none yet."""
        settings = self._unranked() if self.gate.paused() else self.settings
        needed = []
        for number, group in enumerate(groups):
            members = {*members_with_entropies(group, settings), *self.gate.members(group)}
            needed += [(number, i) for i in sorted(members) if group.samples[i].entropies is None]
        return needed

    def _mixed(
        self,
        groups: Sequence[Group],
        settings: MethodSettings,
        version: int,
        teacher: Teacher | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> StepResult:
        if settings.advantage.scale == "mean":
            _refuse_negative(groups)
        joins = self.buffer.joins({group.query.id for group in groups}) if self._follows_replays else {}
        history = self._histories.of(groups, version, joins)
        return step(
            groups,
            settings,
            history=history,
            joins=joins,
            teacher=teacher,
            demonstrations=demonstrations,
            policy_version=version,
            seed=self.seed,
        )


def _step_of(result: StepResult) -> int:
    return result.groups[0].group.samples[0].step


def _refuse_negative(groups: Sequence[Group]) -> None:
    """A mean that a negative reward has part in is nothing to divide by."""
    for sample in (sample for group in groups for sample in group.samples if sample.reward < 0):
        part, value = min(sample.reward_parts.items(), key=lambda item: item[1], default=("reward", sample.reward))
        raise ConfigError(
            f"method.advantage.scale=mean (maxrl) divides by a group's mean reward, so no reward may be negative, and "
            f"an answer to query {sample.query_id!r} got {sample.reward:g} ({part} gave {value:g}): let {part} give 0 "
            "or more, or set method.advantage.scale=std"
        )


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
        samples_of = {**young, **older}
        return self._with_earlier(samples_of, joins) if outcome else samples_of

    def _with_earlier(self, samples_of: dict[str, list[Sample]], joins: Joined) -> dict[str, list[Sample]]:
        """The successes, filled up with those of the earlier run, which count as drawn before this one's first update.

        They have no ids, since those of two buffers would clash.
        """
        if self.earlier is None:
            return samples_of
        settings = self.replay
        most = settings.candidates
        few = [query_id for query_id, samples in samples_of.items() if len(samples) < most]
        used_up = {q: _used_up(joins.get(q, {}), settings.max_repeats) for q in few}
        limit = most + max(map(len, used_up.values()), default=0)  # the used-up ones may be the newest
        before = self.earlier.history(few, outcome=True, limit=limit, context="plain", distinct=settings.distinct)
        as_new = {
            q: [
                replace(s, policy_version=0, step=0, id=None)
                for s in before.get(q, [])
                if s.fingerprint not in used_up[q]
            ]
            for q in samples_of
        }
        return {q: [*samples, *as_new[q]][:most] for q, samples in samples_of.items()}


def _used_up(joins: Mapping[bytes, Joins], most: int | None) -> set[bytes]:
    return set() if most is None else {text for text, past in joins.items() if past.times >= most}
