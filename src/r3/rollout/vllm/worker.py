"""What runs inside vLLM's workers: it takes the policy's weights. vLLM mixes it into its worker class by name.

The names begin with `r3_` because they join those of vLLM's own worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from r3.rollout.vllm.common import shape_of
from r3.rollout.vllm.weights import fetch

EXTENSION = "r3.rollout.vllm.worker.WeightReceiver"


class WeightReceiver:
    """New weights for the model of a vLLM worker."""

    device: Any
    model_runner: Any

    def r3_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these weights into the worker's model, in place."""
        if self.device.type != "cpu":
            self.model_runner.model.load_weights(weights)
            return
        # On a CPU vLLM packs matrices for its kernels when it loads them and drops the originals: a reload packs anew.
        self.model_runner.reload_weights(weights_iterator=weights)
        self._pack_heads()

    def r3_fetch(self, url: str) -> None:
        """Copy the weights that a trainer publishes under this address."""
        weights = fetch(url)
        # A reload that breaks off leaves vLLM's CPU worker unable to load ever again: begin when all is here.
        self.r3_load(list(weights) if self.device.type == "cpu" else weights)

    def r3_shape(self) -> dict[str, Any]:
        """What must agree for a trainer's weights to fit."""
        return shape_of(self.model_runner.model_config.hf_config)

    def _pack_heads(self) -> None:
        """Pack the heads again: vLLM's reload leaves out one that shares its weight with the embedding (0.32)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found,unused-ignore]
            ParallelLMHead,
        )

        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
