"""vLLM servers as a rollout engine: other processes, cards or machines generate, this one trains.

Before the first rollout after an update every server fetches the policy's weights, LoRA adapters merged, straight from
this process's memory (`weights`). Responses are dealt out one by one, to whichever server has room, and each says which
weights drew it: one that did not come from the weights of this rollout is not taken.

A server that goes away leaves the run alone: what it had is asked of the others, or of itself when it is back, after it
was given the weights anew. A response depends on its prompt, seed and weights only, so nothing is lost or changed. As
with vLLM in this process, `exact` is false and entropies are the trainer's to compute.

After `hold` they are given a copy of the weights, which stays as it is while the policy is trained: a server that comes
back in the middle of the update still gets the weights that the others have.

Limits: plain HTTP inside a trusted network; a server's worker must reach a port of this machine that the system picks;
with tensor parallelism each worker fetches the whole model and keeps its part.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from r3.errors import RunError
from r3.rollout import Cancelled, Request, Response, Sampling
from r3.rollout.causal_lm import CausalLM, SingleRun
from r3.rollout.vllm import shape_of
from r3.rollout.vllm.client import START, Broken, Client, Lost, Refused
from r3.rollout.vllm.weights import Publisher, merged_weights

log = logging.getLogger(__name__)

PAUSE = 0.5
"""Seconds between two attempts to reach a server that is gone."""
MOST_TRIES = 8
"""So often servers may lose one response, or a server may fail to take the weights, before the run stops."""


class VllmServerEngine(SingleRun):
    """A rollout engine over vLLM servers; `max_rows` responses are under way at once over all of them."""

    exact = False

    def __init__(self, model: PreTrainedModel, servers: Sequence[str], *, max_rows: int, patience: float) -> None:
        super().__init__(CausalLM(model))
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("its servers take weights from one process; start r3 without torchrun")
        self._links = [_Link(Client(address, patience)) for address in servers]
        for link in self._links:
            link.client.check(shape_of(model.config))
        self._rows = max(1, max_rows // len(servers))
        self._patience = patience
        self._name = secrets.token_hex(4)
        self._updates = 0
        self._publishers: dict[str, Publisher] = {}
        self._held: list[tuple[str, Tensor]] | None = None

    def hold(self) -> None:
        """Until `release`, hand out a copy of the weights as they are now, which lies in this machine's memory."""
        self._held = [(name, weight.detach().to("cpu", copy=True)) for name, weight in self._weights()]

    def release(self) -> None:
        """The weights may change now: the next `generate` hands them out again."""
        self._end_running()
        self._cancelled.clear()
        self._held = None
        self._updates += 1

    @property
    def version(self) -> str:
        """The label of the policy's weights as they are now, on the servers that have them."""
        return f"r3-{self._name}-{self._updates}"

    def hand_over(self, client: Client) -> None:
        """Give a server the policy's weights."""
        host = client.local_address()
        if host not in self._publishers:
            self._publishers[host] = Publisher(self._weights, host=host)
        client.load(self._publishers[host].url, self.version)

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        return merged_weights(self._policy.model) if self._held is None else self._held

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        rollout = _Rollout(self, self._links, requests, sampling, self._rows, self._patience, self._cancelled)
        try:
            yield from rollout.responses()
        finally:
            rollout.close()


@dataclass(slots=True)
class _Job:
    """A response that is wanted."""

    number: int
    index: int
    tries: int = 0


class _Link:
    """A server, and how it stands."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock = threading.Lock()
        self.version: str | None = None
        """The label of the weights that it has, as far as we know."""
        self.handovers = 0
        self.failures = 0
        """Handovers that it could not take, in a row."""
        self.gone_since: float | None = None
        self.retry_at = 0.0
        self.reason = ""

    def gone(self, error: Exception) -> None:
        """It needs the weights again before it is asked for anything."""
        self.version = None
        self.retry_at = time.monotonic() + PAUSE
        self.reason = str(error)
        if self.gone_since is None:
            self.gone_since = time.monotonic()
            log.warning(
                "rollout.servers: %s is gone (%s); what it had is asked of the others, or of it when it is back",
                self.client.address,
                error,
            )

    def back(self, version: str) -> None:
        """It has these weights."""
        if self.gone_since is not None:
            log.warning("rollout.servers: %s is back", self.client.address)
        self.version, self.gone_since, self.failures = version, None, 0
        self.handovers += 1


class _Rollout:
    """One `generate`: jobs in a row, and threads that each see one job through at one server."""

    def __init__(
        self,
        engine: VllmServerEngine,
        links: Sequence[_Link],
        requests: Sequence[Request],
        sampling: Sampling,
        rows: int,
        patience: float,
        cancelled: threading.Event,
    ) -> None:
        self.engine, self.requests, self.sampling, self.patience = engine, requests, sampling, patience
        self.cancelled = cancelled
        self.version = engine.version
        self.jobs = deque(_Job(number, i) for number, request in enumerate(requests) for i in range(request.n))
        self.total = len(self.jobs)
        self.links = links
        self.results: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.more = threading.Condition()
        self.threads = [
            threading.Thread(target=self._lane, args=(link,), name="r3-rollout", daemon=True)
            for link in self.links
            for _ in range(min(rows, self.total))
        ]

    def responses(self) -> Generator[Response, None, None]:
        for thread in self.threads:
            thread.start()
        for _ in range(self.total):
            result = self._next()
            if isinstance(result, Exception):
                raise result
            yield result

    def close(self) -> None:
        """End all threads, and at the servers what is unfinished."""
        self.stop.set()
        with self.more:
            self.more.notify_all()
        while any(thread.is_alive() for thread in self.threads):
            for link in self.links:
                link.client.drop()
            for thread in self.threads:
                thread.join(0.05)

    def _next(self) -> Response | Exception:
        while not self.cancelled.is_set():
            try:
                return self.results.get(timeout=PAUSE)
            except queue.Empty:
                self._give_up_if_all_are_gone()
        return Cancelled()

    def _give_up_if_all_are_gone(self) -> None:
        gone = [link.gone_since for link in self.links]
        if all(since is not None and time.monotonic() - since > self.patience for since in gone):
            said = "; ".join(f"{link.client.address}: {link.reason}" for link in self.links)
            raise RunError(
                f"rollout.servers: none came back within rollout.server_patience={self.patience:g} seconds ({said}); "
                f"start one with: {START}, then go on with the run's --resume"
            )

    def _lane(self, link: _Link) -> None:
        """Job after job at one server, as long as there are any and it is there."""
        try:
            while self._wait_for_jobs():
                if not self._ready(link):
                    self.stop.wait(PAUSE)
                    continue
                try:
                    job = self.jobs.popleft()
                except IndexError:  # another lane was quicker
                    continue
                self._see_through(job, link)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller of generate gets it
            self.results.put(error)

    def _wait_for_jobs(self) -> bool:
        with self.more:
            self.more.wait_for(lambda: self.stop.is_set() or bool(self.jobs))
        return not self.stop.is_set()

    def _see_through(self, job: _Job, link: _Link) -> None:
        """Ask for one response; put the job back where the server is lost."""
        handover = link.handovers
        try:
            request = self.requests[job.number]
            response = link.client.generate(request, job.number, job.index, self.sampling, self.version)
        except Refused as error:
            raise RunError(f"rollout.servers: {link.client.address}: {error}") from error
        except Lost as error:
            if self.stop.is_set():
                return
            with link.lock:
                if link.handovers == handover:  # else it was lost and came back meanwhile: old news
                    link.gone(error)
                    job.tries += 1
            if job.tries >= MOST_TRIES:
                raise RunError(
                    f"rollout.servers: one response was lost {job.tries} times, the last time by "
                    f"{link.client.address}: {error}; look at that server's log"
                ) from error
            with self.more:
                self.jobs.append(job)
                self.more.notify_all()
        else:
            self.results.put(response)

    def _ready(self, link: _Link) -> bool:
        """Whether the server is there with this rollout's weights; gives them to it if not."""
        with link.lock:
            if link.version == self.version:
                return True
            if self.stop.is_set() or time.monotonic() < link.retry_at:
                return False
            try:
                self.engine.hand_over(link.client)
            except (Lost, Refused) as error:
                if self.stop.is_set():
                    return False
                link.failures += isinstance(error, Broken)
                if isinstance(error, Refused) or link.failures >= MOST_TRIES:
                    raise RunError(
                        f"rollout.servers: {link.client.address} does not take the weights ({error}); "
                        "look at that server's log"
                    ) from error
                link.gone(error)
                return False
            link.back(self.version)
            return True
