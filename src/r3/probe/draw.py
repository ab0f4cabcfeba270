"""Drawing the answers of a probe within a budget of tokens.

Three parts: two plain groups for each of a seeded sample of training queries; reflection answers to those never solved,
beside as many further plain ones; and truncated answers carried on to twice the limit. A round of requests is made only
if the budget holds even when every answer reaches the limit, so that it is never exceeded; what short answers leave
over goes to further rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from r3.algorithm import Algorithm, Prompt
from r3.buffer import SampleBuffer
from r3.errors import ConfigError
from r3.judging import Answer, judge_all
from r3.method.settings import MethodSettings
from r3.rollout import Request, Response
from r3.samples import Group, Query, Sample, seed_of
from r3.train.build import Parts, make_sampler
from r3.train.sampler import QueryStream, Sampler
from r3.verify.judge import Verdict

DEFAULT_GROUPS = 512
"""The default budget is enough for this many groups of full length."""
FEWEST_GROUPS = 16
PLAIN_SHARE, LIFT_SHARE = 0.5, 0.35
"""Shares of the budget; the rest, and what is left over, is for carrying on truncated answers."""
MOST_ROUNDS = 8
"""Most reflection groups per query."""


@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """A truncated answer, carried on to twice the limit."""

    sample: Sample
    right: bool
    of_all: bool
    """It is from one of the groups that every query got, not from a hard query's further ones."""


_Cut = tuple[Group, Sample, bool]
"""A truncated answer with its group, and whether it is `Late.of_all`."""


@dataclass(slots=True, eq=False)
class Drawn:
    """Everything that a probe drew."""

    plain: list[tuple[Group, Group]] = field(default_factory=list)
    """Two groups for each query."""
    lift: list[tuple[Group, Group]] = field(default_factory=list)
    """Pairs of a further plain and a reflection group of queries never solved in `plain`; maybe several per query."""
    hard: int = 0
    """Queries never solved in `plain`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Why hard queries got no reflection prompt."""
    late: list[Late] = field(default_factory=list)
    no_room: int = 0
    """Truncated answers that could not be carried on, because the model's context is too short."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Generated tokens, by part."""
    seconds: float = 0.0
    """Seconds spent generating and judging."""

    @property
    def plain_groups(self) -> list[Group]:
        """Every group under a plain prompt."""
        return [*(group for pair in self.plain for group in pair), *(plain for plain, _ in self.lift)]


def budget_of(tokens: int | None, group_size: int, limit: int) -> int:
    """The budget asked for, or the default."""
    least = FEWEST_GROUPS * group_size * limit
    if tokens is None:
        return DEFAULT_GROUPS * group_size * limit
    if tokens < least:
        raise ConfigError(
            f"--tokens {tokens}: this recipe's groups of {group_size} answers of up to {limit:,} tokens need at least "
            f"--tokens {least}; give as many, or lower rollout.group_size or rollout.max_tokens"
        )
    return tokens


def draw(parts: Parts, budget: int, tell: Callable[[str], None]) -> Drawn:
    """Draw all parts. The same recipe, seed and budget draw the same answers."""
    sampler = make_sampler(parts)
    with SampleBuffer(":memory:", per_query=None, total=None) as buffer:
        drawing = _Drawing(parts, sampler, buffer, budget)
        tell("plain answers")
        drawing.plain_pairs(reserve=round((1 - PLAIN_SHARE) * budget))
        tell("reflection answers")
        drawing.lift_pairs(reserve=round((1 - PLAIN_SHARE - LIFT_SHARE) * budget))
        tell("truncated answers, carried on")
        drawing.carry_on()
        tell("more reflection answers")
        drawing.lift_pairs(reserve=0)
    parts.engine.release()
    return drawing.drawn


class _Drawing:
    """A probe in progress."""

    def __init__(self, parts: Parts, sampler: Sampler, buffer: SampleBuffer, budget: int) -> None:
        self.parts, self.sampler, self.buffer = parts, sampler, buffer
        self.left = budget
        self.limit = parts.sampling.max_tokens
        self.seed = parts.config.run.seed
        self.rounds = 0
        self.unsolved: list[Query] | None = None
        """Hard queries still to be asked, each up to several times; None before they are known."""
        self.drawn = Drawn()
        reflecting = _reflecting(parts)
        self.algorithm = Algorithm(reflecting, buffer, parts.policy.tokenizer, seed=self.seed, prompts=parts.prompts)

    @property
    def pair_cost(self) -> int:
        """Most tokens of two groups."""
        return 2 * self.parts.config.rollout.group_size * self.limit

    def plain_pairs(self, reserve: int) -> None:
        """Two plain groups for each query, in the order in which training would meet them."""
        queries = self.parts.task.train
        stream = QueryStream(queries, seed=self.seed, epochs=1)
        first = 0
        while batch := stream.take(self._room(reserve, self.pair_cost, first)):
            first = first or len(batch)
            prompts = self.algorithm.plain_prompts(batch)
            groups = self._sample([*prompts, *prompts], "plain")
            self.buffer.add([sample for group in groups for sample in group.samples])
            self.drawn.plain += zip(groups[: len(batch)], groups[len(batch) :], strict=True)

    def lift_pairs(self, reserve: int) -> None:
        """A plain and a reflection group for each query that was never solved, in turn, while the budget lasts.

        These answers decide nothing about which queries are asked and do not join the history: both sides are fresh.
        """
        if self.unsolved is None:
            hard = [a.query for a, b in self.drawn.plain if a.solve_none and b.solve_none]
            self.drawn.hard = len(hard)
            self.unsolved = hard * MOST_ROUNDS
        first = 0
        while self.unsolved and (room := self._room(reserve, self.pair_cost, first)):
            first = first or room
            asked = MOST_ROUNDS * self.drawn.hard - len(self.unsolved)
            room = min(room, self.drawn.hard - asked % self.drawn.hard)  # no query twice in one round
            self._reflected(self.unsolved[:room], count_refused=asked < self.drawn.hard)
            self.unsolved = self.unsolved[room:]

    def _reflected(self, batch: Sequence[Query], *, count_refused: bool) -> None:
        asked = self.algorithm.ask([(query, 1) for query in batch], step=self.rounds + 1)
        if count_refused:
            self.drawn.refused.update({why: count for why, count in asked.counts.items() if why != "built"})
        reflections = asked.reflections
        if reflections:
            plain = [asked.plain[prompt.position] for prompt in reflections]
            groups = self._sample([*plain, *reflections], "lift")
            self.drawn.lift += zip(groups[: len(plain)], groups[len(plain) :], strict=True)

    def carry_on(self) -> None:
        """Truncated answers to twice the limit: of queries in a seeded order, every answer of one."""
        by_query: dict[str, list[_Cut]] = {}
        for number, group in enumerate(self.drawn.plain_groups):
            for sample in group.samples:
                if sample.truncated:
                    of_all = number < 2 * len(self.drawn.plain)
                    by_query.setdefault(group.query.id, []).append((group, sample, of_all))
        ids = list(by_query)
        order = np.random.default_rng(seed_of(f"{self.seed}/probe/late")).permutation(len(ids))
        cut = [answer for i in order for answer in by_query[ids[i]]]
        fitting = [answer for answer in cut if self._fits(answer[0], answer[1])]
        self.drawn.no_room = len(cut) - len(fitting)
        first = 0
        while fitting and (room := self._room(0, self.limit, first)):
            first = first or room
            batch, fitting = fitting[:room], fitting[room:]
            self.drawn.late += self._carried_on(batch)

    def _fits(self, group: Group, sample: Sample) -> bool:
        most = self.parts.policy.max_context
        return most is None or len(group.prompt) + len(sample) + self.limit <= most

    def _carried_on(self, batch: Sequence[_Cut]) -> list[Late]:
        """An answer cut at the limit is a prompt like any other; the sampling is the same."""
        started, seed = time.perf_counter(), self._next_seed()
        requests = [
            Request(np.concatenate([group.prompt, sample.tokens]), 1, seed_of(f"{seed}/{index}"))
            for index, (group, sample, _) in enumerate(batch)
        ]
        late: dict[int, Late] = {}
        lengths: list[int] = []

        def keep(answer: Answer[Response], verdict: Verdict) -> None:
            _, sample, of_all = batch[answer.source.request]
            late[answer.source.request] = Late(sample, verdict.right and not answer.truncated, of_all)
            lengths.append(len(answer.source.tokens))

        judge_all(self._whole(batch, self.parts.engine.generate(requests, self.parts.sampling)), keep)
        self._spent("late", lengths, started)
        return [late[index] for index in range(len(batch))]

    def _whole(self, batch: Sequence[_Cut], responses: Iterable[Response]) -> Iterator[Answer[Response]]:
        """Each answer from its first token: what was cut, and what it went on with."""
        for response in responses:
            group, sample, _ = batch[response.request]
            tokens = [*sample.tokens.tolist(), *response.tokens.tolist()]
            text = self.parts.policy.tokenizer.decode(tokens, skip_special_tokens=True)
            yield Answer(group.query, self.parts.task.judge, text, response.finish == "length", response)

    def _room(self, reserve: int, cost: int, first: int) -> int:
        """How many more requests fit the budget without its reserve; 0 once a round would be too small."""
        room = max(0, self.left - reserve) // cost
        return room if room * 16 >= first else 0

    def _sample(self, prompts: Sequence[Prompt], part: str) -> list[Group]:
        started = time.perf_counter()
        seed = self._next_seed()
        groups = self.sampler.sample(prompts, step=self.rounds, version=0, seed=seed)
        self._spent(part, (len(sample) for group in groups for sample in group.samples), started)
        return groups

    def _next_seed(self) -> str:
        self.rounds += 1
        return f"{self.seed}/probe/{self.rounds}"

    def _spent(self, part: str, lengths: Iterable[int], started: float) -> None:
        tokens = sum(lengths)
        self.left -= tokens
        self.drawn.tokens[part] += tokens
        self.drawn.seconds += time.perf_counter() - started


def _reflecting(parts: Parts) -> MethodSettings:
    """The recipe's reflection, its template and all, switched on for every query that is asked, from epoch 1."""
    reflection = parts.config.method.reflection
    most = reflection.max_prompt_tokens
    if parts.policy.max_context is not None:
        most = min(most, parts.policy.max_context - parts.sampling.max_tokens)
    everything = {
        "enabled": True,
        "tau": 0.5,
        "from_epoch": 1,
        "when": "hard",
        "window": None,
        "give_up_after": None,
        "budget": "extra",
        "max_share": 1.0,
        "min_lift": 0.0,
        "max_prompt_tokens": most,
    }
    return parts.config.method.model_copy(update={"reflection": reflection.model_copy(update=everything)})
