"""Linear layers that read the same input, run as one matrix product while decoding.

A decoding step at few lanes is a chain of small products, each too short to use the card's bandwidth. Queries, keys and
values share their input, and so do the two halves of a gated MLP. Their weights are laid side by side in memory: the
parameters stay the same objects and become views of one tensor, so that training sees no difference and nothing is
held twice. While `with fused():` runs, the first of them computes for all and the others hand out their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinears:
    """All the linear layers of a model that can be fused."""

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for parent in model.modules():
            for names in GROUPS:
                layers = [parent._modules.get(name) for name in names]
                if _alike(layers):
                    self._join(parent, names, [layer for layer in layers if isinstance(layer, nn.Linear)])

    @contextmanager
    def __call__(self) -> Iterator[None]:
        for parent, name, _, stand_in in self._replaced:
            parent._modules[name] = stand_in
        try:
            yield
        finally:
            for parent, name, layer, _ in self._replaced:
                parent._modules[name] = layer

    def _join(self, parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
        weight = side_by_side([layer.weight for layer in layers])
        bias = side_by_side([layer.bias for layer in layers]) if layers[0].bias is not None else None
        fused = FusedLinear(weight, bias, [layer.out_features for layer in layers])
        stand_ins = [fused, *(Part(fused, index) for index in range(1, len(layers)))]
        self._replaced += zip([parent] * len(layers), names, layers, stand_ins, strict=True)


def _alike(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are plain linear layers (no adapters, no quantisation) over one input, on one device."""
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in linear}
    return len(linear) == len(layers) and len(kinds) == 1


@torch.no_grad()
def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds the parameters one below the other; from now on they are views of it.

    Where they are so already (another engine of the same model did it), it is that tensor: weights exist once.
    """
    first, total = parameters[0].data, sum(len(parameter) for parameter in parameters)
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    one_storage = len({p.data.untyped_storage().data_ptr() for p in parameters}) == 1
    contiguous = all(p.data.is_contiguous() for p in parameters)
    if one_storage and contiguous and ends[:-1] == [p.data_ptr() for p in parameters[1:]]:
        return first.as_strided((total, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class FusedLinear(nn.Module):
    """Stands in for the first layer: computes for all of them, returns the first part, keeps the rest till asked."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        # Plain attributes: as parameters or buffers the weights would be there twice.
        self.whole = (weight, bias)
        self.sizes = list(sizes)
        self.rest: list[Tensor | None] = [None] * len(sizes)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = torch.split(F.linear(x, *self.whole), self.sizes, dim=-1)
        for index, part in enumerate(rest, 1):
            self.rest[index] = part
        return first


class Part(nn.Module):
    """Stands in for a later layer: hands out what the fused one computed for it."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = (fused,)  # in a tuple, so that it is not a submodule
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        part = self.fused[0].rest[self.index]
        assert part is not None, "the fused layer has not run"
        self.fused[0].rest[self.index] = None
        return part
