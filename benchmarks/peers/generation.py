"""Generation engines behind one method: `generate(work)` writes every response of the work and returns how many tokens.

- native, portable: r3's own, exact log-probs and entropies of every token included.
- generate, generate-static: transformers' `generate`; neither log-probs nor entropies. The batch runs until its longest
  response ends.
- vllm: no log-probs. vllm-logprobs: the sampled token's, of the distribution it was drawn from, as reinforcement
  learning needs them. vllm-seeded: besides, every request has a seed of its own, which is what makes a response
  independent of its batch (r3's engines always do that). None of the three has entropies.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import NotMeasured
from work import PAD, Shape, Work, random_model


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is started with."""

    shape: Shape
    folder: Path
    device: str
    max_rows: int
    max_context: int
    vllm_memory: float
    vllm_weights: str


class Generator(ABC):
    """An engine, started."""

    ready = False
    """Whether starting it compiled and captured everything: a short warm-up then does for long work."""

    @abstractmethod
    def generate(self, work: Work, engine: str) -> int:
        """Write every response; the tokens written. `engine` is the variant of a family."""

    def runs(self, work: Work, engine: str) -> str | None:
        """Why it cannot do this work, or None."""
        return None


class Own(Generator):
    """r3's engines, through their protocol."""

    def __init__(self, setup: Setup, family: str) -> None:
        device = torch.device(setup.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = random_model(setup.shape, device, dtype)
        self.engine = own_engine(self.model, family, setup.max_rows)

    def generate(self, work: Work, engine: str) -> int:
        written = 0
        for response in self.engine.generate(work.requests(), work.sampling()):
            assert response.entropies is not None
            written += len(response.tokens)
        self.engine.release()
        return written


def own_engine(model: Any, family: str, max_rows: int) -> Any:
    """r3's engine of that name over a model."""
    if family == "portable":
        from r3.rollout.transformers import TransformersEngine

        return TransformersEngine(model, max_rows=max_rows)
    try:
        from r3.rollout.native import NativeEngine
    except ImportError as error:
        raise NotMeasured(f"r3's native engine is not there ({error}); leave it out with --engines") from None
    try:
        return NativeEngine(model, max_rows=max_rows, compile=model.device.type == "cuda")
    except ValueError as error:
        raise NotMeasured(f"{error}; take --engines portable") from None


class Transformers(Generator):
    """`generate` of transformers, as one batch padded on the left."""

    def __init__(self, setup: Setup) -> None:
        self.device = torch.device(setup.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = random_model(setup.shape, self.device, dtype)
        self.max_rows = setup.max_rows
        self.cache_bytes = setup.shape.cache_bytes

    def runs(self, work: Work, engine: str) -> str | None:
        rows = min(self.max_rows, sum(map(len, work.lengths)))
        needed = rows * work.context * self.cache_bytes
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 16e9
        if needed > 0.9 * free:
            return f"its cache would take {needed / 1e9:.0f} GB at {rows} rows; lower --max-rows"
        return None

    @torch.no_grad()
    def generate(self, work: Work, engine: str) -> int:
        rows = list(work.flat())
        written = 0
        for first in range(0, len(rows), self.max_rows):
            batch = rows[first : first + self.max_rows]
            longest = max(length for _, length in batch)
            output = self.model.generate(
                **self._padded([prompt for prompt, _ in batch]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=PAD,
                cache_implementation="static" if engine.endswith("static") else None,
            )
            new = output.shape[1] - max(len(prompt) for prompt, _ in batch)
            written += sum(min(new, length) for _, length in batch)  # what lies behind a row's length is thrown away
        return written

    def _padded(self, prompts: list[np.ndarray]) -> dict[str, torch.Tensor]:
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), PAD, np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        return {
            "input_ids": torch.from_numpy(ids).to(self.device),
            "attention_mask": torch.from_numpy(mask).to(self.device),
        }


class Vllm(Generator):
    """vLLM in this process, with prefix caching and CUDA graphs; one request per response, each with its own limit."""

    ready = True

    def __init__(self, setup: Setup) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise NotMeasured(f"vLLM cannot be imported ({error}); pip install vllm==0.24.0") from None
        if not setup.device.startswith("cuda"):
            raise NotMeasured("vLLM's wheels run on CUDA cards only; use --device cuda")
        self.parameters = SamplingParams
        self.llm = LLM(
            model=str(setup.folder),
            load_format=setup.vllm_weights,
            dtype="bfloat16",
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_rows,
            gpu_memory_utilization=setup.vllm_memory,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            seed=0,
        )

    def generate(self, work: Work, engine: str) -> int:
        rows = list(work.flat())
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt, _ in rows]
        parameters = [self._parameters(length, work.seed + row, engine) for row, (_, length) in enumerate(rows)]
        self.llm.reset_prefix_cache()  # prompts of an earlier run do not count; those a group shares are found again
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def _parameters(self, length: int, seed: int, engine: str) -> Any:
        """Without `seed` vLLM draws for the whole batch at once, which is faster; without text it does not decode."""
        return self.parameters(
            temperature=1.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=None if engine == "vllm" else 0,
            flat_logprobs=True,
            seed=seed if engine == "vllm-seeded" else None,
        )


FAMILIES = {
    "native": ("native",),
    "portable": ("portable",),
    "generate": ("generate", "generate-static"),
    "vllm": ("vllm", "vllm-logprobs", "vllm-seeded"),
}


def start(family: str, setup: Setup) -> Generator:
    """Start an engine of a family; its variants share it."""
    if family == "vllm":
        return Vllm(setup)
    if family == "generate":
        return Transformers(setup)
    return Own(setup, family)
