"""vLLM as a rollout engine: in this process, on this card, asleep while the policy trains.

It keeps weights of its own: every `generate` wakes it and copies the policy's into it, in place; `release` puts it to
sleep again, which gives its memory back. Its log-probs are those of what it drew from (temperature, top-k and top-p
applied), but of its own kernels, not the trainer's: `exact` is false, and the update corrects the difference with
truncated importance weights. It gives no entropies; those that the ranking reward needs come from a forward of ours.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from r3.rollout.base import SingleRun
from r3.rollout.causal_lm import CausalLM
from r3.rollout.protocol import Request, Response, Sampling
from r3.samples import FinishReason


class VllmEngine(SingleRun):
    """A rollout engine over vLLM; `path` is the folder or hub id that the model was loaded from."""

    exact = False

    def __init__(self, model: PreTrainedModel, path: str, *, max_rows: int, memory: float = 0.85) -> None:
        super().__init__(CausalLM(model))
        if self._policy.device.type != "cuda":
            raise ValueError("vLLM needs a CUDA card; use the transformers engine")
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ValueError("vLLM holds merged weights, and LoRA adapters are not merged here; use the native engine")
        self._llm = _load(path, model.dtype, max_rows, memory)
        self._llm.sleep(level=2)  # its weights are not needed: ours come before the first token
        self._asleep = True

    def release(self) -> None:
        """Put vLLM to sleep: its cache and its copy of the weights are given up."""
        self._end_running()
        if not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def _responses(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Response, None, None]:
        self._wake()
        engine = self._llm.llm_engine
        open_requests = set()
        try:
            for place, request in enumerate(requests):
                prompt = {"prompt_token_ids": request.prompt.tolist()}
                for index in range(request.n):
                    name = f"{place}/{index}"
                    open_requests.add(engine.add_request(name, prompt, _parameters(request, index, sampling)))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        open_requests.discard(output.request_id)
                        yield _response(output)
        finally:
            if open_requests:
                engine.abort_request(list(open_requests))

    def _wake(self) -> None:
        """Wake vLLM and give it the policy's weights as they are now; keys cached under older ones are forgotten."""
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up()
            self._asleep = False
        weights = [(name, parameter.data) for name, parameter in self._policy.model.named_parameters()]
        self._llm.apply_model(lambda model: model.load_weights(weights))
        self._llm.reset_prefix_cache()


def _load(path: str, dtype: torch.dtype, max_rows: int, memory: float) -> Any:
    # In this process: weights are handed over as they lie on the card, and nothing has to be serialised.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # flashinfer's sampler cannot give the log-probs of what was drawn from, and vLLM fails where it is not installed.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError(f"vLLM cannot be imported ({error}); install r3-rl[vllm]") from error
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return LLM(
        model=path,
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        max_num_seqs=max_rows,
        gpu_memory_utilization=memory * free / total,
        enable_sleep_mode=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )


def _parameters(request: Request, index: int, sampling: Sampling) -> Any:
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]

    return SamplingParams(
        max_tokens=request.max_tokens(index, sampling),
        stop_token_ids=list(sampling.stop_tokens),
        ignore_eos=True,  # only the stop tokens given end a response
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        seed=int(np.random.SeedSequence([request.seed, index]).generate_state(1)[0]),
        logprobs=0,  # of the drawn token alone
        detokenize=False,
    )


def _response(output: Any) -> Response:
    place, index = (int(part) for part in output.request_id.split("/"))
    completion = output.outputs[0]
    tokens = np.array(completion.token_ids, np.int32)
    logprobs = [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    finish: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
    return Response(place, index, tokens, np.array(logprobs, np.float32), None, finish)
