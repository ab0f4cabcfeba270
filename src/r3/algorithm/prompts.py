"""What is asked in a step: queries under one or several prompts, each for a group of answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from r3.samples import PLAIN, Context, Group, IntArray, PromptText, Query, Sample

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
    """Of a prompt that follows the first answers: the index in the step of the plain prompt it helps."""
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
        """With at most so many reflection prompts (None: all), in a multiple; those left out are counted as no_room."""
        built = self.reflections
        room = len(built) if reflections is None else min(len(built), reflections)
        room -= room % multiple_of
        return Asked((*self.plain, *built[:room]), {**self.counts, "no_room": len(built) - room})


def seed_of(name: str) -> int:
    """A 63-bit seed that any change of the name changes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
