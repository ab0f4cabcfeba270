"""The portable engine: any Hugging Face causal language model that attends over a key-value cache, on any device.

The model is the policy in training: its parameters are read in place and in their own dtype, the distributions drawn
from are float32. `decoding` has the loop, `kv_cache` the memory, `sampling` the draw, `causal_lm` the model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from transformers import PreTrainedModel

from r3.rollout.base import SingleRun
from r3.rollout.causal_lm import CausalLM
from r3.rollout.decoding import Limits, Run
from r3.rollout.protocol import Request, Response, Sampling


class TransformersEngine(SingleRun):
    """A rollout engine over a Hugging Face causal language model; one `generate` runs at a time.

    `max_rows` bounds how many responses are written at once, and so the memory of the cache; `prefill_tokens` how many
    prompt tokens, padding included, one forward takes; `refill` is the share of rows that must be free before waiting
    ones take their places (each time costs a copy of the cache).
    """

    exact = True

    def __init__(
        self, model: PreTrainedModel, *, max_rows: int, prefill_tokens: int = 16_384, refill: float = 0.25
    ) -> None:
        super().__init__(CausalLM(model))
        self._limits = Limits(max_rows, prefill_tokens, refill)

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        return Run(self._policy, requests, sampling, self._limits).responses()

    def release(self) -> None:
        """Free the cache, ending an unfinished `generate`, and hand the memory back to the device."""
        self._end_running()
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
