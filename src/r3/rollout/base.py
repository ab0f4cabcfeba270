"""What all engines share: one `generate` at a time, checked before it starts, and ended by whatever comes next."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Generator, Sequence

from r3.rollout.causal_lm import CausalLM
from r3.rollout.protocol import Request, Response, Sampling


class SingleRun(abc.ABC):
    """An engine over a policy of which one `generate` runs at a time."""

    def __init__(self, policy: CausalLM) -> None:
        self._policy = policy
        # Weak, so that a caller who drops the responses half-way ends the work and frees its memory at once.
        self._running: weakref.ref[Generator[Response, None, None]] | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        """Yield every request's n responses as they finish; an earlier call that was left unfinished is ended."""
        self._end_running()
        self._policy.check(requests, sampling)
        responses = self._responses(requests, sampling)
        self._running = weakref.ref(responses)
        return responses

    @abc.abstractmethod
    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        """The responses; what it holds it gives up when closed."""

    def _end_running(self) -> None:
        responses = self._running() if self._running is not None else None
        if responses is not None:
            responses.close()
