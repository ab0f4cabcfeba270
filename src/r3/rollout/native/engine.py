"""The native engine: samples from the policy's own weights, in place, over a paged cache.

No second copy of the model, nothing to synchronise after an update, and the log-probs and entropies of the very
distribution each token was drawn from. `schedule` decides, `decoder` computes, `kernels` are what is ours on the GPU,
`cpu` what is ours on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from r3.policy.layers import multiplies_bfloat16
from r3.policy.machine import free_memory
from r3.rollout import Request, Response, Sampling
from r3.rollout.causal_lm import CausalLM, SingleRun, diverged
from r3.rollout.native.cpu import PAGE as CPU_PAGE
from r3.rollout.native.cpu import CpuOps, LlamaStep, knows
from r3.rollout.native.decoder import Decoder
from r3.rollout.native.forward import Unsupported
from r3.rollout.native.ops import PAGE, CacheShape, Ops, PagedCache, TritonOps
from r3.rollout.native.schedule import PagePool, Prefill, Row, Schedule

log = logging.getLogger(__name__)
GIB = 2**30
STEPS, CPU_STEPS = 16, 4
"""Tokens that are written between two looks at what has finished. On a CPU a look costs little and an idle row much."""


class NativeEngine(SingleRun):
    """A rollout engine over a Hugging Face causal language model; one `generate` runs at a time.

    `max_rows` bounds how many responses are written at once; `memory` is the share of the device's free memory that
    the cache may take; `steps` is how many tokens are written between two looks at what has finished; `compile` fuses
    the small operations of a layer (seconds, once). `ops` are by default those of the device: Triton's kernels on a
    CUDA card, the C loops on a CPU.
    """

    exact = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 256,
        memory: float = 0.85,
        steps: int | None = None,
        compile: bool = False,
        prefill_tokens: int = 16_384,
        page: int | None = None,
        max_pages: int | None = None,
        ops: Ops | None = None,
    ) -> None:
        super().__init__(CausalLM(model))
        self._max_rows, self._memory, self._prefill_tokens = max_rows, memory, prefill_tokens
        self._max_pages = max_pages
        cuda = self._policy.device.type == "cuda"
        ops = ops or (TritonOps() if cuda else CpuOps(model.dtype))
        shape = CacheShape.of(model, page or (PAGE if ops.in_sizes else CPU_PAGE))
        ops.check(shape)
        self._cache = PagedCache(shape, self._policy.device)
        self._decoder = Decoder(
            self._policy,
            self._cache,
            ops,
            steps=steps or (STEPS if cuda else CPU_STEPS),
            compile=compile,
            step=LlamaStep(model, ops) if isinstance(ops, CpuOps) and knows(model) else None,
        )
        if not cuda and model.dtype == torch.bfloat16 and not multiplies_bfloat16():
            log.warning(
                "model.dtype=bfloat16: this processor has no instructions for it; model.dtype=float32 is faster here"
            )
        self.preempted = 0
        """Rows of the last `generate` that had to be written again from their prefix because the cache was full."""
        self._probe()

    def release(self) -> None:
        """Give the cache's memory back to the device, ending an unfinished `generate`; captured graphs stay."""
        self._end_running()
        self._cache.free()
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        schedule = self._schedule(requests, sampling)
        finished: list[Row] = []
        while not schedule.over:
            turn = schedule.next_turn()
            self._decoder.prefill(turn.prefills, self._prefill_tokens)
            self._cache.copy_pages(turn.copies)
            self._decoder.start(schedule.running, schedule.table, sampling)
            for row in finished:  # the caller's work on them overlaps with the device's on the next turn
                yield row.response()
            drawn = self._decoder.collect(len(schedule.running))
            if not np.isfinite(drawn.logprobs).all():
                raise diverged()
            finished = schedule.record(drawn)
        for row in finished:
            yield row.response()
        self.preempted = schedule.preempted
        if schedule.preempted:
            log.info("the key-value cache was full %d times: rows were set back and resumed", schedule.preempted)

    def _schedule(self, requests: Sequence[Request], sampling: Sampling) -> Schedule:
        rows = min(self._max_rows, sum(request.n for request in requests))
        pool = PagePool(self._reserve(requests, sampling, rows), self._cache.shape.page)
        schedule = Schedule(
            requests, sampling, pool, lanes=rows, steps=self._decoder.steps, prefill_tokens=self._prefill_tokens
        )
        self._decoder.prepare(rows, schedule.table.shape[1])
        return schedule

    def _reserve(self, requests: Sequence[Request], sampling: Sampling, rows: int) -> int:
        """Pages of the cache for this work: as many as it can use, as far as memory goes."""
        longest = max((len(request.prompt) for request in requests), default=1) + sampling.max_tokens
        page = self._cache.shape.page
        row = -(-(longest + self._decoder.steps) // page) + 1
        wanted = rows * row + sum(-(-len(request.prompt) // page) for request in requests) + 1
        least = row + 1
        if self._cache.pages >= wanted:
            return self._cache.pages
        self._cache.free()
        most = self._affordable()
        if most < least:
            size = self._cache.shape.page_bytes
            raise ValueError(
                f"a prompt and response of {longest} tokens need {least * size / GIB:.2f} GiB of key-value cache, but "
                f"only {most * size / GIB:.2f} GiB may be used ({self._memory:.0%} of the free memory); lower "
                "rollout.max_tokens, free memory on the device, or raise rollout.memory"
            )
        self._cache.allocate(min(wanted, most))
        return self._cache.pages

    def _affordable(self) -> int:
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._policy.device)
        else:
            free = free_memory()
        pages = int(free * self._memory) // self._cache.shape.page_bytes
        return min(pages, self._max_pages or pages)

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare a prefill and a step with the model's own forward: an architecture may do what we do not know.

        Rows of tokens from all over the vocabulary. In half precision the middle one counts: what follows a token that
        the model has hardly met (reserved ones, most of all) can change by nats with the rounding.
        """
        name = type(self._policy.model).__name__
        prompts = np.linspace(0, self._policy.vocabulary - 1, 54).astype(np.int32).reshape(6, 9).T
        greedy = Sampling(max_tokens=1, stop_tokens=(), temperature=0)
        each = 1 + prompts.shape[1] // self._cache.shape.page
        table = (1 + np.arange(len(prompts) * each, dtype=np.int32)).reshape(len(prompts), each)
        rows = [
            Row(lane, 0, tokens, 1, np.random.default_rng(0), int(tokens[-1]), pages=pages.tolist(), lane=lane)
            for lane, (tokens, pages) in enumerate(zip(prompts, table, strict=True))
        ]
        try:
            self._cache.allocate(1 + table.size)
            self._decoder.prepare(len(rows), each)
            self._decoder.prefill([Prefill(row.prompt[:-1], row.pages) for row in rows], self._prefill_tokens)
            self._decoder.probe(rows, table, greedy)
        except Unsupported as error:
            raise ValueError(f"{name} {error}") from error
        finally:
            self._cache.free()
        drawn = self._decoder.collect(len(rows))
        forward = [self._policy.own_logprobs(tokens) for tokens in prompts]
        expected = np.array([float(logs[int(token)]) for logs, token in zip(forward, drawn.tokens[:, 0], strict=True)])
        gaps = np.abs(expected - drawn.logprobs[:, 0])
        exact = self._cache.shape.dtype == torch.float32
        gap, most = (float(gaps.max()), 1e-3) if exact else (float(np.median(gaps)), 0.3)
        if not gap < most:
            raise ValueError(f"{name} attends in a way the native engine does not know (log-probs off by {gap:.2g})")
