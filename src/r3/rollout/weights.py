"""The policy's weights as an engine with a copy of its own wants them: under their own names, adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_BASE = ".base_layer."


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the model by name, as it is now; LoRA adapters are added to what they adapt, one layer at a time.

    The model itself stays as it is. Weights without an adapter are not copied.
    """
    for name, parameter in model.named_parameters():
        owner, adapted, leaf = name.rpartition(_BASE)
        if not adapted:
            if ".lora_" not in name:
                yield name, parameter.data
        elif leaf == "weight":
            yield f"{owner}.{leaf}", _merged(model.get_submodule(owner), parameter.data)
        else:
            yield f"{owner}.{leaf}", parameter.data


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """A peft layer's weight with its active adapters added, in float32 and rounded once."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)
