"""Prefills and decoding steps on the device: buffers that stay in place, CUDA graphs over them, captured as needed.

A graph is one decoding step for so many lanes and such a cut of attention. The first step of a kind runs as ordinary
code and is then captured; all later ones are replays: no Python, no launches one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import mul

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from r3.policy.attention import layout_of
from r3.policy.layers import CompiledLayers, onednn
from r3.rollout import Sampling
from r3.rollout.causal_lm import CausalLM
from r3.rollout.native.forward import PAGED, DecodePass, FusedLinears, Pass, PrefillPass
from r3.rollout.native.ops import PAGE, Lanes, Ops, PagedCache, Split
from r3.rollout.native.schedule import Drawn, Prefill, Row

LANES = (4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""Batch sizes that get a graph; between them the lanes that are too many idle."""
FULL, PROGRAMS = 384, 1056
"""Programs of the attention kernel that fill a large card well enough, and those to make where there are fewer: three
and eight for each of an H200's multiprocessors."""
CHUNK, LEAST = 2048, 128
"""Most keys of one program, lest one long row hold up the rest, and fewest, lest putting them together cost more."""


class Decoder:
    """Runs the policy over a paged cache, `steps` tokens of every lane at a time."""

    def __init__(
        self,
        policy: CausalLM,
        cache: PagedCache,
        ops: Ops,
        *,
        steps: int,
        compile: bool,
        step: Callable[[Lanes, PagedCache], Tensor] | None = None,
    ) -> None:
        """`step` computes a decoding step's logits in place of the model's own code."""
        self.cache, self.steps = cache, steps
        self._policy, self._ops = policy, ops
        self._compiled = CompiledLayers(policy.model, "rollout") if compile else None
        self._fused = self._fuse()
        self._direct = step
        self._parameters = self._addresses()
        self._lanes = Lanes.new(0, 0, steps, policy.device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if policy.device.type == "cuda" else None

    def prepare(self, lanes: int, pages: int) -> None:
        """Make room for so many lanes with rows of so many pages; drop graphs that no longer fit."""
        lanes = self._lanes_for(lanes)
        have = self._lanes.table.shape
        if lanes > have[0] or pages > have[1]:
            size = max(lanes, have[0]), max(pages, have[1])
            self._lanes = Lanes.new(*size, self.steps, self._policy.device)
            self._drop_graphs()
        if self._addresses() != self._parameters:  # a graph reads weights where they were when it was captured
            self._drop_graphs()
            self._fused = self._fuse()
            self._parameters = self._addresses()

    def _fuse(self) -> Callable[[], AbstractContextManager[None]]:
        return FusedLinears(self._policy.model) if self._ops.in_sizes else partial(onednn, self._policy.model)

    def _lanes_for(self, rows: int) -> int:
        return lanes_for(rows) if self._ops.in_sizes else rows

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        if self._pool is not None:  # a pool whose last graph is gone cannot be captured into again
            self._pool = torch.cuda.graph_pool_handle()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._policy.model.parameters()]

    def prefill(self, prefills: Sequence[Prefill], budget: int) -> None:
        """Compute the keys and values of these tokens into their pages, about `budget` tokens per forward."""
        batch: list[Prefill] = []
        for prefill in prefills:
            if batch and sum(len(p.tokens) for p in (*batch, prefill)) > budget:
                self._prefill(batch)
                batch = []
            batch.append(prefill)
        if batch:
            self._prefill(batch)

    @torch.no_grad()
    def _prefill(self, batch: Sequence[Prefill]) -> None:
        device = self._policy.device
        within = np.arange(self.cache.shape.page)
        slots = [(np.array(p.pages)[:, None] * len(within) + within).ravel()[: len(p.tokens)] for p in batch]
        slots_T = torch.from_numpy(np.concatenate(slots)).to(device)
        tokens_T = torch.from_numpy(np.concatenate([p.tokens for p in batch]).astype(np.int64)).to(device)
        layout = layout_of([len(p.tokens) for p in batch], device)
        with self._forwarding():
            self.hidden(tokens_T, layout.position_T, PrefillPass(self.cache, slots_T, layout, self._ops))

    @torch.no_grad()
    def start(self, rows: Sequence[Row], table: npt.NDArray[np.int32], sampling: Sampling) -> None:
        """Begin a turn of these rows, by lane; on CUDA the call returns while the device works."""
        self._upload(rows, table)
        n = self._lanes_for(len(rows))
        longest = max(row.cached for row in rows) + self.steps
        split = split_for(n, self.cache.shape.heads, longest)
        self._launch(n, split, sampling)
        for row in rows:  # while the device works: the numbers these rows will want next
            row.ahead = row.generator.random(self.steps)

    def _launch(self, n: int, split: Split, sampling: Sampling) -> None:
        left = self.steps
        if self._pool is None:
            with self._forwarding() if self._direct is None else nullcontext():
                for _ in range(left):
                    self._step(n, split, sampling)
            return
        kind = (n, split, sampling.temperature, sampling.top_k, sampling.top_p)
        if kind not in self._graphs:
            self._capture(kind, n, split, sampling)
            left -= 1
        for _ in range(left):
            self._graphs[kind].replay()

    @torch.no_grad()
    def probe(self, rows: Sequence[Row], table: npt.NDArray[np.int32], sampling: Sampling) -> None:
        """One step, run as it is."""
        self._upload(rows, table)
        n = self._lanes_for(len(rows))
        with self._forwarding(compiled=False):
            self._step(n, split_for(n, self.cache.shape.heads, PAGE), sampling)

    def collect(self, rows: int) -> Drawn:
        """Wait for the turn, and fetch what it drew."""
        lanes = self._lanes.first(rows)
        return Drawn(*(x.to("cpu", copy=True).numpy() for x in (lanes.tokens, lanes.logprobs, lanes.entropies)))

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attention: Pass) -> Tensor:
        """Last hidden states of one row of tokens, [T, hidden size]; call it within `_forwarding`."""
        output = self._policy.model.get_decoder()(
            input_ids=tokens_T.unsqueeze(0), position_ids=position_T.unsqueeze(0), use_cache=False, r3_pass=attention
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _step(self, n: int, split: Split, sampling: Sampling) -> None:
        lanes = self._lanes.first(n)
        self._ops.draw(self._logits(lanes, split), lanes, sampling, self._policy.last_position)
        lanes.step.add_(1)

    def _logits(self, lanes: Lanes, split: Split) -> Tensor:
        if self._direct is not None:
            return self._direct(lanes, self.cache)
        hidden = self.hidden(lanes.token, lanes.position, DecodePass(self.cache, lanes, self._ops, split))
        return self._policy.head(hidden)

    def _capture(self, kind: Hashable, n: int, split: Split, sampling: Sampling) -> None:
        """Run one step as it is, which compiles what must be compiled, then record it."""
        graph = torch.cuda.CUDAGraph()
        with self._forwarding():
            self._step(n, split, sampling)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(n, split, sampling)
        self._graphs[kind] = graph

    def _upload(self, rows: Sequence[Row], table: npt.NDArray[np.int32]) -> None:
        """The rows' state into their lanes; lanes behind them idle on a page of their own."""
        n = self._lanes_for(len(rows))
        idle = n - len(rows)
        lanes = self._lanes
        _set(lanes.token[:n], [row.newest for row in rows] + [0] * idle)
        _set(lanes.position[:n], [row.cached for row in rows] + [0] * idle)
        _set(lanes.length[:n], [row.cached + 1 for row in rows] + [1] * idle)
        uniforms = np.zeros((n, self.steps))
        for lane, row in enumerate(rows):
            uniforms[lane] = row.uniforms(self.steps)
        _set(lanes.uniforms[:n], uniforms)
        pages = np.zeros((n, table.shape[1]), np.int32)
        pages[: len(rows)] = table[: len(rows)]
        _set(lanes.table[:n, : table.shape[1]], pages)
        lanes.step.zero_()

    @contextmanager
    def _forwarding(self, *, compiled: bool = True) -> Iterator[None]:
        """The model ready for a forward of ours: evaluating, our attention, its layers compiled where asked."""
        layers: AbstractContextManager[None] = self._compiled() if compiled and self._compiled else nullcontext()
        with self._policy.evaluating(), self._policy.attention(PAGED), self._fused(), layers:
            yield


def lanes_for(rows: int) -> int:
    """The least batch size with a graph that holds so many rows.

    >>> lanes_for(3), lanes_for(65), lanes_for(256), lanes_for(1025)
    (4, 96, 256, 1152)
    """
    return next((n for n in LANES if n >= rows), -(-rows // 128) * 128)


def split_for(lanes: int, heads: int, longest: int) -> Split:
    """Chunks enough to fill the card, and none too long. Lengths count in steps of four: few cuts, few graphs.

    >>> split_for(256, 2, 600), split_for(64, 2, 4200), split_for(8, 2, 300)
    (Split(chunks=1, keys=2048), Split(chunks=9, keys=960), Split(chunks=16, keys=128))
    """
    longest = next(bound for bound in itertools.accumulate(itertools.repeat(4), mul, initial=CHUNK) if bound >= longest)
    programs = lanes * heads
    chunks = max(1 if programs >= FULL else -(-PROGRAMS // programs), -(-longest // CHUNK))
    keys = max(LEAST, -(-longest // (chunks * PAGE)) * PAGE)
    return Split(-(-longest // keys), keys)


def _set(target: Tensor, values: npt.ArrayLike) -> None:
    target.copy_(torch.from_numpy(np.ascontiguousarray(values)))
