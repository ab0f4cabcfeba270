"""What is asked in a step: queries under one or several prompts, each for a group of answers.

`Reflections` is ISR's part: which queries are reflected on, within the budget, and with which prompts. `Helping` makes
the prompts that follow a step's first answers, and the demonstrations that join them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from r3.buffer import SampleBuffer
from r3.method.help import critique_prompt, demonstration_of, hinted_prompt, to_refine
from r3.method.reflection import Tokenizer, WhyNot, has_lift, in_vain, most_reflections, reflect, why_not_hard
from r3.method.settings import MethodSettings, ReflectionSettings
from r3.samples import PLAIN, Context, Group, IntArray, PromptText, Query, Sample, seed_of

Batch = Sequence[tuple[Query, int]]
"""Queries, each with the epoch it is met in; a query may be there twice."""


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
    follows: int | None = None
    """The plain prompt that this one helps, by its index in the step; None for a prompt of the first round."""
    single: bool = False
    """It gets one answer, whatever G is (a critique)."""

    def answers(self, group_size: int) -> int:
        """How many answers it is to get, of G: the plain one of two prompts gets the odd one."""
        if self.single:
            return 1
        if not self.halved:
            return group_size
        return group_size // 2 if self.context.kind == "reflection" else group_size - group_size // 2

    def group(self, samples: Sequence[Sample]) -> Group:
        """The group that these answers to it form."""
        return Group(
            self.query, tuple(samples), self.tokens, self.context, self.plain_tokens, self.revisited, self.follows
        )


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
        """At most this many reflection prompts (None: all), in a multiple; those left out are counted as no_room."""
        built = self.reflections
        room = len(built) if reflections is None else min(len(built), reflections)
        room -= room % multiple_of
        return Asked((*self.plain, *built[:room]), {**self.counts, "no_room": len(built) - room})


log = logging.getLogger(__name__)


class Reflections:
    """Builds the reflection prompts of a step from what the buffer knows of its queries."""

    def __init__(self, settings: ReflectionSettings, buffer: SampleBuffer, tokenizer: Tokenizer, *, seed: int) -> None:
        self.settings, self.buffer, self.tokenizer, self.seed = settings, buffer, tokenizer, seed
        self._was_paused = False

    def prompts(self, plain: Sequence[Prompt], step: int) -> tuple[list[Prompt], Counter[str]]:
        """The reflection prompts of the hard queries; and how often they could be built, and why not."""
        settings = self.settings
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
        settings, ids = self.settings, [prompt.query.id for prompt in plain]
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
        settings = self.settings
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
        settings = self.settings
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


class Helping:
    """Builds what SAGE, Critique-GRPO and LUFFY give to groups; its answers depend on its arguments alone."""

    def __init__(self, settings: MethodSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    def prompts(self, asked: Sequence[Prompt], groups: Sequence[Group], *, step: int) -> list[Prompt]:
        """The next round of prompts; `asked` are those that were answered so far, `groups` the answers to them."""
        hint, critique = self.settings.hint, self.settings.critique
        if not ((hint.enabled and step >= hint.from_step) or critique.enabled):
            return []
        followed: dict[int, list[Group]] = {}
        for group in groups:
            if group.follows is not None:
                followed.setdefault(group.follows, []).append(group)
        more = []
        for index, (prompt, group) in enumerate(zip(asked, groups, strict=True)):
            if prompt.context.kind != "plain":
                continue
            before = followed.get(index, [])
            more += self._hinted(prompt, index, [group, *before]) if hint.enabled else []
            more += self._refined(prompt, index, group) if critique.enabled and not before else []
        return more

    def _hinted(self, plain: Prompt, index: int, groups: Sequence[Group]) -> list[Prompt]:
        """The query with its next hint, if none of its groups solved any."""
        if not all(group.solve_none for group in groups):
            return []
        made = hinted_prompt(plain.query, len(groups) - 1, self.tokenizer, self.settings.hint)
        if made is None:
            return []
        text, tokens = made
        return [replace(plain, text=text, tokens=tokens, context=Context("hint"), follows=index, halved=False)]

    def _refined(self, plain: Prompt, index: int, group: Group) -> list[Prompt]:
        """A prompt for each failure that is to be refined."""
        settings = self.settings.critique
        prompts = []
        for failure in to_refine(group, settings):
            made = critique_prompt(plain.query, failure, self.tokenizer, settings)
            if made is not None:
                text, tokens = made
                context = Context("critique")
                prompts.append(replace(plain, text=text, tokens=tokens, context=context, follows=index, single=True))
        return prompts

    def demonstrations(self, groups: Sequence[Group], *, version: int) -> dict[int, Sample]:
        """The demonstrations that may join, by their group's index, still to be judged."""
        settings = self.settings.demonstration
        if not settings.enabled:
            return {}
        found: dict[int, Sample] = {}
        for index, group in enumerate(groups):
            if group.context.kind != "plain" or (settings.when == "solve_none" and not group.solve_none):
                continue
            first = group.samples[0]
            sample = demonstration_of(
                group.query, self.tokenizer, self._end, settings, version=version, step=first.step, epoch=first.epoch
            )
            if sample is not None:
                found[index] = sample
        return found

    @property
    def _end(self) -> int:
        tokenizer: Any = self.tokenizer
        end: int | None = getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError(
                "demonstrations end with an end-of-text token, and the tokenizer names none: set eos_token"
            )
        return end
