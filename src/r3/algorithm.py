"""Algorithm 1 without a model: what to ask, and what to learn from the answers.

    asked  = algorithm.ask(batch, step=…)            a batch D_b: plain prompts, and reflection prompts of hard queries
    groups = [prompt.group(samples) for prompt …]    whoever generates answers every prompt G times and judges them
    result = algorithm.learn(groups, version=…)      replay, ranking, Eq. 3; what was answered joins the buffer S
    ...                                              train on result.weighted: prompt, tokens, advantage, weight

Our own loop and the trainers inside TRL and verl all go through these two calls, so that the order of Algorithm 1, and
what each of its lines reads from the buffer, is written down here and nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from r3.buffer import SampleBuffer
from r3.errors import ConfigError
from r3.method.distill import Teacher
from r3.method.gate import RankingGate
from r3.method.lessons import Lesson, lessons_of
from r3.method.mixed import StepResult, is_mixed
from r3.method.reflection import (
    Tokenizer,
    WhyNot,
    has_lift,
    in_vain,
    most_reflections,
    plain_prompt,
    reflect,
    why_not_hard,
)
from r3.method.replay import by_age, wanted_outcomes
from r3.method.settings import MethodSettings
from r3.method.step import members_with_entropies, step
from r3.samples import PLAIN, Context, ContextKind, FloatArray, Group, IntArray, Joins, PromptText, Query, Sample

log = logging.getLogger(__name__)

Batch = Sequence[tuple[Query, int]]
"""Queries, each with the epoch it is met in; a query may be there twice."""
Joined = Mapping[str, Mapping[bytes, Joins]]
"""How past answers fared in replay, by query and fingerprint."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A query under one of its prompts, to be answered by a group."""

    query: Query
    epoch: int
    position: int
    """Its query's index in the batch."""
    tokens: IntArray
    text: PromptText
    """The same before it was tokenized, for trainers that tokenize themselves."""
    context: Context = PLAIN
    plain_tokens: IntArray | None = None
    """For a reflection prompt: the plain one's."""
    revisited: bool = False
    """Its query is asked before its turn (`revisit`)."""
    halved: bool = False
    """It shares its query's G answers with the query's other prompt (`reflection.budget` = shared)."""

    def answers(self, group_size: int) -> int:
        """How many answers it is to get, of G: the plain one of two prompts gets the odd one."""
        if not self.halved:
            return group_size
        return group_size // 2 if self.context.kind == "reflection" else group_size - group_size // 2

    def group(self, samples: Sequence[Sample]) -> Group:
        """The group that these answers to it form."""
        return Group(self.query, tuple(samples), self.tokens, self.context, self.plain_tokens, self.revisited)


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of a step."""

    prompts: tuple[Prompt, ...]
    """A plain one for each query, in the order of the batch; then the reflection prompts of the hard ones."""
    counts: Mapping[str, int]
    """How many reflection prompts were built, and how many queries got none for which reason."""

    @property
    def plain(self) -> tuple[Prompt, ...]:
        return tuple(prompt for prompt in self.prompts if prompt.context.kind == "plain")

    @property
    def reflections(self) -> tuple[Prompt, ...]:
        return tuple(prompt for prompt in self.prompts if prompt.context.kind == "reflection")

    def limited(self, reflections: int | None, *, multiple_of: int = 1) -> Asked:
        """With at most so many reflection prompts (None: all), in a multiple; those left out are counted as no_room."""
        built = self.reflections
        room = len(built) if reflections is None else min(len(built), reflections)
        room -= room % multiple_of
        return Asked((*self.plain, *built[:room]), {**self.counts, "no_room": len(built) - room})


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
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.earlier = earlier
        """Of a run before this one, whose successes may be replayed where this one has too few; only read."""
        self.tokenizer = tokenizer
        self.seed = seed
        self._plain_tokens: dict[tuple[PromptText, str], IntArray] = {}
        self._was_paused = False
        self.gate = RankingGate(settings.ranking, buffer.late_pairs)

    # ---------------------------------------------------------------- ask

    def ask(self, batch: Batch, *, step: int, revisited: Collection[int] = ()) -> Asked:
        """The plain prompts of the batch's queries, and a second prompt for each hard one (ISR).

        `revisited` says by their positions which queries are asked before their turn.
        """
        plain = [replace(prompt, revisited=prompt.position in revisited) for prompt in self.plain_prompts(batch)]
        reflections, counts = self._reflection_prompts(plain, step)
        if self.settings.reflection.budget == "shared":
            halved = {prompt.position for prompt in reflections}
            plain = [replace(prompt, halved=prompt.position in halved) for prompt in plain]
        return Asked((*plain, *reflections), counts)

    def plain_prompts(self, batch: Batch) -> list[Prompt]:
        """Every query as it is."""
        return [
            Prompt(query, epoch, position, self._tokens(query), query.prompt)
            for position, (query, epoch) in enumerate(batch)
        ]

    def _tokens(self, query: Query) -> IntArray:
        asked = query.prompt, repr(query.chat_options)
        if asked not in self._plain_tokens:
            self._plain_tokens[asked] = plain_prompt(query, self.tokenizer)
        return self._plain_tokens[asked]

    def _reflection_prompts(self, plain: Sequence[Prompt], step: int) -> tuple[list[Prompt], Counter[str]]:
        """The reflection prompts of the hard queries; and how often they could be built, and why not."""
        settings = self.settings.reflection
        refused = self._not_to_reflect(plain, step)
        hard = [prompt for prompt, reason in zip(plain, refused, strict=True) if reason is None]
        ids = [prompt.query.id for prompt in hard]
        failures = self.buffer.history(ids, outcome=False, limit=settings.candidates, context="plain") if hard else {}
        counts: Counter[str] = Counter(reason for reason in refused if reason is not None)
        built = []
        for prompt in hard:
            query = prompt.query
            rng = np.random.default_rng(seed_of(f"{self.seed}/{step}/{query.id}/reflect"))
            made = reflect(query, failures[query.id], self.tokenizer, settings, rng=rng)
            if isinstance(made, str):
                counts[made] += 1
                continue
            counts["built"] += 1
            built.append(
                replace(
                    prompt,
                    tokens=made.tokens,
                    text=made.text,
                    context=made.context,
                    plain_tokens=prompt.tokens,
                    halved=settings.budget == "shared",
                )
            )
        return built, counts

    def _not_to_reflect(self, plain: Sequence[Prompt], step: int) -> list[WhyNot | None]:
        """Why each query is not to be reflected on; None for the hard ones that are."""
        settings, ids = self.settings.reflection, [prompt.query.id for prompt in plain]
        rates = self.buffer.success_rate(ids, newest=settings.window) if settings.enabled else {}
        reasons = [why_not_hard(rates.get(prompt.query.id), prompt.epoch, settings) for prompt in plain]
        hard = {query_id for query_id, reason in zip(ids, reasons, strict=True) if reason is None}
        refused: dict[str, WhyNot] = {}
        if settings.when == "unsolved":
            ever = self.buffer.attempts(hard, context=None)
            refused |= {query_id: "solved" for query_id, past in ever.items() if past.solved}
        if settings.give_up_after is not None:
            past = self.buffer.attempts(hard - refused.keys(), context="reflection")
            refused |= {q: "given_up" for q, so_far in past.items() if in_vain(so_far.tried, so_far.solved, settings)}
        still = [refused.get(q) if reason is None else reason for q, reason in zip(ids, reasons, strict=True)]
        return self._within_budget(plain, still, step)

    def _within_budget(self, plain: Sequence[Prompt], reasons: list[WhyNot | None], step: int) -> list[WhyNot | None]:
        """The reasons, with those of hard queries that there is no budget for: a seeded choice decides which."""
        settings = self.settings.reflection
        reason: WhyNot = "no_share"
        most = most_reflections(len(plain), settings)
        if settings.enabled and self._paused():
            most, reason = min(most, int(step % settings.probe_every == 0)), "paused"
        hard = [i for i, why in enumerate(reasons) if why is None]
        if len(hard) <= most:
            return reasons
        rng = np.random.default_rng(seed_of(f"{self.seed}/{step}/share"))
        left_out = set(rng.permutation(hard)[most:].tolist())
        return [reason if i in left_out else why for i, why in enumerate(reasons)]

    def _paused(self) -> bool:
        """Whether reflection does not pay for the time being; says so when that changes."""
        settings = self.settings.reflection
        if settings.min_lift == 0.0:
            return False
        after, plain = self.buffer.reflected(settings.lift_window)
        paused = not has_lift(after, plain, settings)
        if paused != self._was_paused:
            log.info(
                "reflection %s: %d of the last %d answers after a shown failure were right, and %d of %d plain ones to "
                "the same queries",
                "pauses" if paused else "goes on",
                *(after.solved, after.tried, plain.solved, plain.tried),
            )
            self._was_paused = paused
        return paused

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

    def learn(self, groups: Sequence[Group], *, version: int, teacher: Teacher | None = None) -> StepResult:
        """What to train on: ranking (SERR), replay (CCR) and Eq. 3 over the groups, whose samples then join S.

        `version` counts the optimiser updates behind the policy that answered. Every fresh sample of the result has
        the id under which the buffer now holds it. `teacher` has what it said of the `lessons`.
        """
        result = self._mixed(groups, self._unranked() if self.gate.paused() else self.settings, version, teacher)
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
        self, groups: Sequence[Group], settings: MethodSettings, version: int, teacher: Teacher | None = None
    ) -> StepResult:
        if settings.advantage.scale == "mean":
            _refuse_negative(groups)
        joins = self.buffer.joins({group.query.id for group in groups}) if self._follows_replays else {}
        history = self._history(groups, version, joins)
        return step(
            groups,
            settings,
            history=history,
            joins=joins,
            teacher=teacher,
            policy_version=version,
            seed=self.seed,
        )

    def _history(self, groups: Sequence[Group], version: int, joins: Joined) -> dict[str, list[Sample]]:
        """Past samples of the outcomes that each group lacks (or of all), as far as the age cap reaches."""
        past: dict[str, list[Sample]] = {}
        for outcome in (True, False):
            ids = [g.query.id for g in groups if outcome in wanted_outcomes(g, self.settings.replay)]
            for query_id, samples in self._candidates(ids, outcome, version, joins).items():
                past.setdefault(query_id, []).extend(samples)
        if self.settings.replay.when in ("always", "revisited"):  # the newest of both outcomes together
            past = {q: sorted(s, key=by_age, reverse=True)[: self.settings.replay.candidates] for q, s in past.items()}
        for query_id, samples in self._just_reflected(groups).items():
            past.setdefault(query_id, []).extend(samples)
        return past

    def _just_reflected(self, groups: Sequence[Group]) -> dict[str, list[Sample]]:
        """Right reflection answers of this very step, for the plain groups of their queries that solved none."""
        if not (self.settings.reflection.enabled and self.settings.reflection.at_once):
            return {}
        stuck = {g.query.id for g in groups if g.solve_none and wanted_outcomes(g, self.settings.replay)}
        right: dict[str, list[Sample]] = {}
        for group in groups:
            if group.context.kind == "reflection" and group.query.id in stuck:
                right.setdefault(group.query.id, []).extend(sample for sample in group.samples if sample.outcome)
        return right

    def _candidates(self, ids: Sequence[str], outcome: bool, version: int, joins: Joined) -> dict[str, list[Sample]]:
        if not ids:
            return {}
        settings = self.settings.replay
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
        settings = self.settings.replay
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


def seed_of(name: str) -> int:
    """A 63-bit seed that any change of the name changes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
