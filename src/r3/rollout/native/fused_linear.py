"""Linear layers that read the same input, run as one matrix product while decoding.

A decoding step at few lanes is a chain of small products, each too short to use the card's bandwidth. Queries, keys and
values share their input, and so do the two halves of a gated MLP. Their weights are laid side by side in memory: the
parameters stay the same objects and become views of one tensor, so that training sees no difference and nothing is
held twice. While `with siblings():` runs, the first of them computes for all and the others hand their part out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Siblings:
    """All families of sibling layers in a model."""

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for parent in model.modules():
            for names in FAMILIES:
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
            for parent, name, own, _ in self._replaced:
                parent._modules[name] = own

    def _join(self, parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
        weight = side_by_side([layer.weight for layer in layers])
        bias = side_by_side([layer.bias for layer in layers]) if layers[0].bias is not None else None
        eldest = Eldest(weight, bias, [layer.out_features for layer in layers])
        stand_ins = [eldest, *(Younger(eldest, place) for place in range(1, len(layers)))]
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
    one = len({p.data.untyped_storage().data_ptr() for p in parameters}) == 1
    if one and ends[:-1] == [p.data_ptr() for p in parameters[1:]] and all(p.data.is_contiguous() for p in parameters):
        return first.as_strided((total, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class Eldest(nn.Module):
    """Computes for all siblings, returns its own part and keeps the rest until they are asked for it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        # Plain attributes: as parameters or buffers the weights would be there twice.
        self.whole = (weight, bias)
        self.sizes = list(sizes)
        self.rest: list[Tensor | None] = [None] * len(sizes)

    def forward(self, x: Tensor) -> Tensor:
        own, *rest = torch.split(F.linear(x, *self.whole), self.sizes, dim=-1)
        for place, part in enumerate(rest, 1):
            self.rest[place] = part
        return own


class Younger(nn.Module):
    """Hands out what the eldest computed."""

    def __init__(self, eldest: Eldest, place: int) -> None:
        super().__init__()
        self.eldest = (eldest,)  # in a tuple, so that it is not a submodule
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        part = self.eldest[0].rest[self.place]
        assert part is not None, "the eldest has not run"
        self.eldest[0].rest[self.place] = None
        return part
