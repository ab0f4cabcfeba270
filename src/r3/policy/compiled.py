"""torch.compile layer by layer: one compilation, of seconds, serves all layers and every length.

The layers keep their code and parameters; inside `with layers():` their calls go to the compiled form. torch caches
compilations on disk for the next run (in TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class CompiledLayers:
    """The decoder layers of a model, compiled for one use (`purpose` names it in the log)."""

    def __init__(self, model: PreTrainedModel, purpose: str) -> None:
        self._purpose = purpose
        self._layers: list[nn.Module] = list(layers_of(model))
        self._compiled: list[Callable[..., Any]] = []
        self._seen = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the compiled layers while the block runs. The first block, which compiles, is timed."""
        if not self._compiled:
            self._compiled = [torch.compile(layer._call_impl, dynamic=True) for layer in self._layers]
        originals = [layer._compiled_call_impl for layer in self._layers]
        started = time.perf_counter()
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer._compiled_call_impl = compiled
        try:
            # Every kind of call (a length of one, gradients on or off) is a compilation of its own; the default limit
            # of eight would silently leave the rest uncompiled.
            with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
                yield
        finally:
            for layer, original in zip(self._layers, originals, strict=True):
                layer._compiled_call_impl = original
        if not self._seen:
            self._seen = True
            log.info("compiled the layers for the %s in %.1f s", self._purpose, time.perf_counter() - started)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks of a decoder."""
    lists = [module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(f"{type(model).__name__} has {len(lists)} lists of layers, not one; set model.compile=false")
    return lists[0]
