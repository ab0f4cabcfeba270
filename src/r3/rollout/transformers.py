"""The portable engine: any Hugging Face causal language model that attends over a key-value cache, on any device.

The model is the policy in training: its parameters are read in place and in their own dtype, the distributions drawn
from are float32. `causal_lm` has the model and its cache, `sampling` the draw; the decoding loop is here.

Rows decode together, one token per step. A row that finishes idles until enough have; then the finished ones leave,
waiting requests are prefilled and their rows join: one copy of the cache for many changes. A prompt is prefilled once,
however many responses it gets and whenever they find room.
"""

from __future__ import annotations

import copy
import threading
from array import array
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from r3.rollout import Cancelled, Request, Response, Sampling
from r3.rollout.causal_lm import CausalLM, RowsOf, SingleRun, diverged, new_cache, regroup
from r3.rollout.sampling import draw, uniform_stream
from r3.samples import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a run's memory, and how eagerly it refills."""

    max_rows: int
    """Most responses written at once."""
    prefill_tokens: int
    """Most prompt tokens, padding included, in one forward (a single longer prompt still goes through)."""
    refill: float
    """Share of the rows that must be free before waiting ones enter."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {self.max_rows}")
        if self.prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {self.prefill_tokens}")
        if not 0 <= self.refill <= 1:
            raise ValueError(f"refill is a share of the rows: it must be in [0, 1], not {self.refill}")


@dataclass(slots=True, eq=False)
class Row:
    """A response being written."""

    request: int
    index: int
    prompt_length: int
    max_tokens: int
    uniforms: Iterator[float]
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    entropies: array[float] = field(default_factory=lambda: array("f"))
    finish: FinishReason | None = None

    @property
    def cached(self) -> int:
        """Tokens whose keys are in the cache: all but the newest, which the next step feeds in."""
        return self.prompt_length + len(self.tokens) - 1

    def add(self, token: int, logprob: float, entropy: float, stop_tokens: frozenset[int]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        if token in stop_tokens:
            self.finish = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish = "length"

    def response(self) -> Response:
        assert self.finish is not None
        logprobs, entropies = np.array(self.logprobs, np.float32), np.array(self.entropies, np.float32)
        return Response(self.request, self.index, np.array(self.tokens, np.int32), logprobs, entropies, self.finish)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Prefilled prompts: their cache, the logits that follow each, and each request's row among them."""

    cache: Cache
    logits: Tensor
    row_of: dict[int, int]

    def only(self, request: int, length: int) -> Prompts:
        """One of them alone, so that the memory of the others can go."""
        cache, row = new_cache(), self.row_of[request]
        regroup(cache, [RowsOf(self.cache, [row])], length)
        return Prompts(cache, self.logits[row : row + 1].clone(), {request: 0})


class Run:
    """One call of `generate`: the rows that wait, the rows being written, and their cache."""

    def __init__(
        self,
        policy: CausalLM,
        requests: Sequence[Request],
        sampling: Sampling,
        limits: Limits,
        cancelled: threading.Event,
    ) -> None:
        self._policy, self._requests, self._sampling, self._limits = policy, requests, sampling, limits
        self._cancelled = cancelled
        self._waiting = deque(
            Row(
                number,
                index,
                len(request.prompt),
                request.max_tokens(index, sampling),
                uniform_stream(request.seed, index),
            )
            for number, request in enumerate(requests)
            for index in range(request.n)
        )
        self._stop_tokens = frozenset(sampling.stop_tokens)
        self._cache = new_cache()
        self._rows: list[Row] = []  # as in the cache, those that finished since the last regrouping included
        self._alive = 0
        # [rows]: newest token, first column, next position
        self._tokens = self._starts = self._positions = torch.empty(0)
        self._columns = 0  # filled, of the cache
        self._last_position = max((row.prompt_length + row.max_tokens for row in self._waiting), default=1) - 1
        self._cut: Prompts | None = None  # the prompt of a request of which only some rows have entered so far

    def responses(self) -> Generator[Response, None, None]:
        """Every response, as it finishes."""
        with self._policy.evaluating(), self._policy.decoding():
            while self._waiting or self._alive:
                if self._cancelled.is_set():
                    raise Cancelled
                finished = self._regroup() if self._regrouping_pays() else self._step()
                for row in finished:
                    yield row.response()

    def _regrouping_pays(self) -> bool:
        """Whether enough rows are idle: of all there might be while some wait, else of those in the cache."""
        slots = self._limits.max_rows if self._waiting else len(self._rows)
        idle = slots - self._alive
        return self._alive == 0 or (idle > 0 and idle >= self._limits.refill * slots)

    @torch.no_grad()  # on the parts between yields: around a yield it would turn the caller's gradients off too
    def _step(self) -> list[Row]:
        """Write one more token of every row; those it finished."""
        columns = torch.arange(self._columns + 1, device=self._starts.device)
        mask = (columns >= self._starts[:, None]).long()
        logits = self._policy.logits(self._tokens[:, None], self._positions[:, None], mask, self._cache)
        self._columns += 1
        # An idle row is fed along with the others, but must not run past the positions the model has.
        self._positions = (self._positions + 1).clamp_(max=self._last_position)
        self._tokens, finished = self._sample(self._rows, logits)
        return finished

    def _sample(self, rows: Sequence[Row], logits: Tensor) -> tuple[Tensor, list[Row]]:
        """Draw the next token of each row; the tokens, and the rows they finished. One transfer to the host."""
        uniforms = torch.tensor([next(row.uniforms) for row in rows], dtype=torch.float64)
        drawn = draw(logits, uniforms, self._sampling)
        on_host = torch.stack([values.double() for values in drawn]).cpu()
        if not on_host.isfinite().all():
            raise diverged()
        alive = [row for row in rows if row.finish is None]
        for row, token, logprob, entropy in zip(rows, *on_host.tolist(), strict=True):
            if row.finish is None:
                row.add(int(token), logprob, entropy, self._stop_tokens)
        finished = [row for row in alive if row.finish is not None]
        self._alive -= len(finished)
        return drawn.tokens.to(self._policy.device), finished

    @torch.no_grad()
    def _regroup(self) -> list[Row]:
        """Let finished rows leave and waiting ones enter, with their first tokens; the rows that these finished."""
        stay = [i for i, row in enumerate(self._rows) if row.finish is None]
        rows = [self._rows[i] for i in stay]
        pieces, tokens = ([RowsOf(self._cache, stay)], [self._tokens[stay]]) if stay else ([], [])
        if not stay:
            self._cache = new_cache()  # now, so that its memory is free for the prefill
        finished: list[Row] = []
        for prompts, entering in self._enter(self._limits.max_rows - len(rows)):
            starts = [prompts.row_of[row.request] for row in entering]
            first_tokens, over = self._sample(entering, prompts.logits[starts])
            finished += over
            stay = [i for i, row in enumerate(entering) if row.finish is None]
            if stay:
                rows += [entering[i] for i in stay]
                pieces.append(RowsOf(prompts.cache, [starts[i] for i in stay]))
                tokens.append(first_tokens[stay])
        self._settle(rows, pieces, tokens)
        return finished

    def _settle(self, rows: list[Row], pieces: Sequence[RowsOf], tokens: Sequence[Tensor]) -> None:
        """Make these the rows being written."""
        self._rows = rows
        if not rows:  # all that entered finished with their first token
            return
        cached = [row.cached for row in rows]
        self._columns = max(cached)
        regroup(self._cache, pieces, self._columns)
        self._tokens = torch.cat(list(tokens))
        self._positions = torch.tensor(cached, device=self._policy.device)
        self._starts = self._columns - self._positions

    def _enter(self, free: int) -> list[tuple[Prompts, list[Row]]]:
        """Take up to `free` rows off the queue, with the prefilled prompts they start from."""
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._alive += len(rows)
        wanted = list(dict.fromkeys(row.request for row in rows))
        sources = [self._cut] if self._cut is not None else []  # the queue is in order: its rows are the next ones
        sources += self._prefill([request for request in wanted if not (sources and request in sources[0].row_of)])
        self._cut = None
        if self._waiting and self._waiting[0].index > 0:
            row = self._waiting[0]
            source = next(prompts for prompts in sources if row.request in prompts.row_of)
            self._cut = source.only(row.request, row.prompt_length)
        return [(prompts, [row for row in rows if row.request in prompts.row_of]) for prompts in sources]

    def _prefill(self, wanted: Sequence[int]) -> list[Prompts]:
        """Run the requests' prompts through the model, in forwards of a bounded size, like lengths together."""
        by_length = sorted(wanted, key=lambda request: len(self._requests[request].prompt))
        prefilled, first = [], 0
        while first < len(by_length):
            last = first + 1
            while last < len(by_length) and self._fits(by_length[first : last + 1]):
                last += 1
            prefilled.append(self._prefill_together(by_length[first:last]))
            first = last
        return prefilled

    def _fits(self, together: Sequence[int]) -> bool:
        longest = len(self._requests[together[-1]].prompt)
        return len(together) * longest <= self._limits.prefill_tokens

    def _prefill_together(self, together: Sequence[int]) -> Prompts:
        """One forward over prompts padded on the left, so that all end in the last column."""
        prompts = [self._requests[request].prompt for request in together]
        tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        mask = np.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, -len(prompt) :] = prompt
            mask[row, -len(prompt) :] = 1
        positions = np.maximum(mask.cumsum(-1) - 1, 0)
        cache = new_cache()
        inputs = torch.from_numpy(np.stack([tokens, positions, mask])).to(self._policy.device)
        logits = self._policy.logits(inputs[0], inputs[1], inputs[2], cache)
        return Prompts(cache, logits, {request: row for row, request in enumerate(together)})


class TransformersEngine(SingleRun):
    """A rollout engine over a Hugging Face causal language model; one `generate` runs at a time.

    `max_rows` bounds how many responses are written at once, and so the memory of the cache; `prefill_tokens` how many
    prompt tokens, padding included, one forward takes; `refill` is the share of rows that must be free before waiting
    ones take their rows (each time costs a copy of the cache).
    """

    exact = True

    def __init__(
        self, model: PreTrainedModel, *, max_rows: int, prefill_tokens: int = 16_384, refill: float = 0.25
    ) -> None:
        super().__init__(CausalLM(model))
        self._limits = Limits(max_rows, prefill_tokens, refill)
        self._copy: CausalLM | None = None
        self._held = False
        """Whether responses come from the copy."""

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        policy = self._copy if self._held and self._copy is not None else self._policy
        return Run(policy, requests, sampling, self._limits, self._cancelled).responses()

    def hold(self) -> None:
        """Until `release`, draw from a copy of the weights as they are now. The copy's memory is kept."""
        if self._copy is None:
            self._copy = CausalLM(copy.deepcopy(self._policy.model).requires_grad_(False))
        else:
            _copy_weights(self._policy.model, self._copy.model)
        self._held = True

    def release(self) -> None:
        """Free the cache, ending an unfinished `generate`, and hand the memory back to the device."""
        self._end_running()
        self._cancelled.clear()
        self._held = False
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    for weight, copied in zip(source.parameters(), target.parameters(), strict=True):
        copied.copy_(weight)
