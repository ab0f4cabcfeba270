"""Which rows are written in which lanes, turn by turn: plain bookkeeping, the same on every device.

A turn is a fixed number of decoding steps. Between turns, finished rows leave their lanes and waiting ones enter. A
prompt is prefilled once; the rows of its group share its full pages and copy the last, partly filled one. Pages are
taken as rows grow, not for the longest row that might be: at limits of 8K to 32K most rows stay far below theirs. When
pages run out, prompts nobody reads yet give theirs back, then the youngest rows do: these go back to the head of the
queue and are prefilled again with what they had written. So every row finishes, and with the same tokens.

Prompts are prefilled but for their last token, which is the first that a row feeds in: every token of a response, the
first included, comes out of a decoding step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r3.rollout import Request, Response, Sampling
from r3.samples import FinishReason, FloatArray, IntArray

IDLE = 0
"""The page that lanes without a row write to; nobody ever holds it."""


class OutOfPages(Exception):
    """More pages are wanted than are free."""


class PagePool:
    """Pages 1 … count - 1 of `size` tokens each; a page shared by several holders is free when the last gives it back.

    >>> pool = PagePool(count=4, size=16)
    >>> held = pool.take(2)
    >>> pool.share(held)
    >>> pool.give_back(held), pool.free
    (None, 1)
    >>> pool.give_back(held), pool.free
    (None, 3)
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, IDLE, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, n: int) -> list[int]:
        """`n` pages that nobody else holds; nothing is taken if there are not as many."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that another holds too."""
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


class Drawn(NamedTuple):
    """A turn's results on the host, [lanes, steps]."""

    tokens: npt.NDArray[np.int32]
    logprobs: FloatArray
    entropies: FloatArray


@dataclass(slots=True, eq=False)
class Row:
    """A response being written, or waiting to be."""

    request: int
    index: int
    prompt: IntArray
    limit: int
    """Most tokens of the response."""
    generator: np.random.Generator
    """Draws the uniform numbers that decide the tokens, as `uniform_stream` does."""
    newest: int
    """The token that the next step feeds in: the prompt's last, then the last that was drawn."""
    count: int = 0
    """Tokens written so far."""
    turns: list[tuple[Drawn, int, int]] = field(default_factory=list)
    """What was written: turn by turn its results, the row's lane in them, and how many of its tokens count. They are
    put together when the response is asked for, while the device is at work, not between turns."""
    ahead: npt.NDArray[np.float64] | None = None
    """Uniform numbers already drawn for the next turn."""
    finish: FinishReason | None = None
    pages: list[int] = field(default_factory=list)
    lane: int = -1

    def uniforms(self, n: int) -> npt.NDArray[np.float64]:
        """The next n numbers."""
        drawn, self.ahead = self.ahead, None
        return self.generator.random(n) if drawn is None else drawn

    @property
    def cached(self) -> int:
        """Tokens whose keys are in the cache between turns: all but the newest."""
        return len(self.prompt) + self.count - 1

    def written(self) -> IntArray:
        """The prompt and what was written so far, but for the newest token."""
        return np.concatenate([self.prompt, *self._parts(0)])[:-1]

    def response(self) -> Response:
        assert self.finish is not None
        tokens, logprobs, entropies = (np.concatenate(self._parts(kind)) for kind in range(3))
        return Response(self.request, self.index, tokens, logprobs, entropies, self.finish)

    def _parts(self, kind: int) -> list[npt.NDArray[Any]]:
        return [drawn[kind][lane, :n] for drawn, lane, n in self.turns]


@dataclass(slots=True, eq=False)
class Prompt:
    """A request's prompt, in the cache while rows of it are still to start."""

    tokens: IntArray
    to_start: int
    pages: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens whose keys and values are to be computed into these pages."""

    tokens: IntArray
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do before the next steps: prefills first, then the copies of pages (all read before any is written)."""

    prefills: list[Prefill]
    copies: list[tuple[int, int]]


class Schedule:
    """The rows of one `generate`, over a pool of pages and a number of lanes."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        pool: PagePool,
        *,
        lanes: int,
        steps: int,
        prefill_tokens: int,
    ) -> None:
        self.pool, self.steps, self.prefill_tokens, self.lanes = pool, steps, prefill_tokens, lanes
        self.running: list[Row] = []
        """By lane, without holes."""
        self.waiting = deque(
            Row(
                number,
                index,
                request.prompt,
                request.max_tokens(index, sampling),
                np.random.default_rng([request.seed, index]),
                int(request.prompt[-1]),
            )
            for number, request in enumerate(requests)
            for index in range(request.n)
        )
        self.prompts = [Prompt(request.prompt, request.n) for request in requests]
        self.preempted = 0
        """Rows sent back to the queue because pages ran out."""
        longest = max((len(request.prompt) for request in requests), default=0) + sampling.max_tokens + steps
        self.table = np.full((lanes, pool.pages_for(longest)), IDLE, np.int32)
        """The pages of each lane's row, in order."""
        self._stops = np.array(sampling.stop_tokens, np.int32)
        self._admitted: list[Row] = []  # running rows, in the order they entered
        self._leaving: list[list[int]] = []  # pages to give back once this turn's copies are listed

    @property
    def over(self) -> bool:
        return not self.waiting and not self.running

    def next_turn(self) -> Turn:
        """Let rows grow, then enter; afterwards every running row has room for a turn's steps."""
        crowded = self._grow()
        turn = Turn([], [])
        while not crowded and self.waiting and len(self.running) < self.lanes:
            try:
                self._enter(self.waiting[0], turn)
            except OutOfPages:
                if self.running:
                    break
                self._make_room()
            else:
                self.waiting.popleft()
        if turn.prefills:
            self._prefill_ahead(turn)
        for pages in self._leaving:
            self.pool.give_back(pages)
        self._leaving.clear()
        return turn

    def record(self, drawn: Drawn) -> list[Row]:
        """Note what a turn drew; the rows it finished, which are gone from their lanes."""
        tokens = drawn.tokens[: len(self.running)]
        stopped = np.isin(tokens, self._stops)
        first_stop = np.where(stopped.any(1), stopped.argmax(1) + 1, self.steps + 1)
        room = np.array([row.limit - row.count for row in self.running], np.int64)
        ends = np.minimum(np.minimum(first_stop, room), self.steps)
        finished = []
        last = tokens[np.arange(len(tokens)), ends - 1]
        for row, end, stop, newest in zip(self.running, ends.tolist(), first_stop.tolist(), last.tolist(), strict=True):
            row.turns.append((drawn, row.lane, end))
            row.count += end
            row.newest = newest
            if stop <= end:
                row.finish = "stop"
            elif row.count == row.limit:
                row.finish = "length"
            if row.finish is not None:
                finished.append(row)
        for row in finished:
            self._leave(row)
        return finished

    def _grow(self) -> bool:
        """Pages for the next steps of every running row, oldest first; whether rows had to leave for that."""
        before = self.preempted
        for row in list(self._admitted):
            while row.lane >= 0:
                try:
                    self._extend(row)
                    break
                except OutOfPages:
                    self._make_room()
        return self.preempted > before

    def _extend(self, row: Row) -> None:
        missing = self.pool.pages_for(row.cached + self.steps) - len(row.pages)
        if missing > 0:
            held = len(row.pages)
            row.pages += self.pool.take(missing)
            self.table[row.lane, held : held + missing] = row.pages[held:]

    def _make_room(self) -> None:
        """Prompts that wait go first: the rows that will read them are not yet there. Then the youngest row."""
        idle = [prompt for prompt in self.prompts if prompt.pages]
        for prompt in idle:
            self.pool.give_back(prompt.pages or [])
            prompt.pages = None
        if idle:
            return
        if len(self._admitted) <= 1:
            row = self._admitted[0] if self._admitted else self.waiting[0]
            raise OutOfPages(
                f"one response of {row.cached + self.steps} tokens does not fit {self.pool.count - 1} pages of "
                f"{self.pool.size} tokens"
            )
        row = self._admitted[-1]
        self.preempted += 1
        self._leave(row)
        self.waiting.appendleft(row)

    def _enter(self, row: Row, turn: Turn) -> None:
        """Give the row a lane and pages, and say what has to be computed or copied into them."""
        wanted = self.pool.pages_for(row.cached + self.steps)
        spare = len(self.running)  # a page for each that runs already, lest the newcomer be thrown out again at once
        if row.count:  # it was here before
            pages = self._take(wanted, spare)
            turn.prefills.append(Prefill(row.written(), pages))
        else:
            prompt = self.prompts[row.request]
            full, rest = divmod(row.cached, self.pool.size)
            missing = self.pool.pages_for(row.cached) if prompt.pages is None else 0
            fresh = self._take(wanted - full + missing, spare)
            if prompt.pages is None:
                prompt.pages, fresh = fresh[:missing], fresh[missing:]
                if missing:
                    turn.prefills.append(Prefill(row.written(), prompt.pages))
            self.pool.share(prompt.pages[:full])
            pages = prompt.pages[:full] + fresh
            if rest:
                turn.copies.append((prompt.pages[full], pages[full]))
            self._started(prompt)
        row.pages, row.lane = pages, len(self.running)
        self.running.append(row)
        self._admitted.append(row)
        self.table[row.lane, : len(pages)] = pages

    def _take(self, n: int, spare: int) -> list[int]:
        if n + spare > self.pool.free and self.running:
            raise OutOfPages
        return self.pool.take(n)

    def _started(self, prompt: Prompt) -> None:
        prompt.to_start -= 1
        if prompt.to_start == 0:
            assert prompt.pages is not None
            self._leaving.append(prompt.pages)  # not yet back in the pool: a copy of this turn may still read them
            prompt.pages = None

    def _prefill_ahead(self, turn: Turn) -> None:
        """Fill the forward up with the next prompts, which costs almost nothing now and a forward of its own later."""
        room = self.prefill_tokens - sum(len(prefill.tokens) for prefill in turn.prefills)
        budget = self.pool.free // 8
        for prompt in dict.fromkeys(self.prompts[row.request] for row in self.waiting if not row.count):
            cached = len(prompt.tokens) - 1
            if prompt.pages is not None or cached == 0:
                continue
            needed = self.pool.pages_for(cached)
            if cached > room or needed > budget:
                return
            prompt.pages = self.pool.take(needed)
            turn.prefills.append(Prefill(prompt.tokens[:-1], prompt.pages))
            room, budget = room - cached, budget - needed

    def _leave(self, row: Row) -> None:
        """Free the row's pages and its lane, which the row of the last lane takes over."""
        self.pool.give_back(row.pages)
        row.pages = []
        self._admitted.remove(row)
        last = self.running.pop()
        if last is not row:
            last.lane = row.lane
            self.running[last.lane] = last
            self.table[last.lane] = IDLE
            self.table[last.lane, : len(last.pages)] = last.pages
        row.lane = -1
