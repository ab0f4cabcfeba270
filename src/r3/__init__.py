"""R³: Replay, Reflection and Ranking rewards for reinforcement learning of reasoning LLMs.

What is exported here is the public API. It is loaded on first use: `import r3` costs no torch, no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from r3.algorithm import Algorithm, Asked, Prompt
    from r3.api import Run, train
    from r3.buffer import SampleBuffer, SampleBufferError
    from r3.method.advantage import group_advantages
    from r3.method.mixed import StepResult, WeightedSample
    from r3.method.objective import TokenBatch, policy_loss
    from r3.method.ranking import structural_entropy_rewards
    from r3.method.reflection import is_hard, reflect, reflection_prompt
    from r3.method.replay import choose_replay
    from r3.method.settings import MethodSettings
    from r3.method.step import step
    from r3.samples import Context, Group, Message, Query, Sample
    from r3.train import Callback

_HOME = {
    "Algorithm": "r3.algorithm",
    "Asked": "r3.algorithm",
    "Callback": "r3.train",
    "Context": "r3.samples",
    "Group": "r3.samples",
    "Message": "r3.samples",
    "MethodSettings": "r3.method.settings",
    "Prompt": "r3.algorithm",
    "Query": "r3.samples",
    "Run": "r3.api",
    "Sample": "r3.samples",
    "SampleBuffer": "r3.buffer",
    "SampleBufferError": "r3.buffer",
    "StepResult": "r3.method.mixed",
    "TokenBatch": "r3.method.objective",
    "WeightedSample": "r3.method.mixed",
    "choose_replay": "r3.method.replay",
    "group_advantages": "r3.method.advantage",
    "is_hard": "r3.method.reflection",
    "policy_loss": "r3.method.objective",
    "reflect": "r3.method.reflection",
    "reflection_prompt": "r3.method.reflection",
    "step": "r3.method.step",
    "structural_entropy_rewards": "r3.method.ranking",
    "train": "r3",
}

__all__ = [
    "Algorithm",
    "Asked",
    "Callback",
    "Context",
    "Group",
    "Message",
    "MethodSettings",
    "Prompt",
    "Query",
    "Run",
    "Sample",
    "SampleBuffer",
    "SampleBufferError",
    "StepResult",
    "TokenBatch",
    "WeightedSample",
    "__version__",
    "choose_replay",
    "group_advantages",
    "is_hard",
    "policy_loss",
    "reflect",
    "reflection_prompt",
    "step",
    "structural_entropy_rewards",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'r3' has no attribute {name!r}")
    if name == "train":  # the package of that name, which can be called
        return importlib.import_module("r3.train")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
