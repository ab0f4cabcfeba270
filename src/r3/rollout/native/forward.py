"""The policy's own modelling code as the engine runs it: attention over the paged cache, some linear layers fused,
everything else as transformers wrote it.

A forward is one row of tokens, [1, T]: the newest token of every lane when decoding, whole prompts one after the other
when prefilling. Norms and rotary embeddings do not care; attention does, and is told by a `Pass`.

Linear layers that read the same input run as one matrix product while decoding. A decoding step at few lanes is a chain
of small products, each too short to use the card's bandwidth. Queries, keys and values share their input, and so do the
two halves of a gated MLP. Their weights are laid side by side in memory: the parameters stay the same objects and
become views of one tensor, so that training sees no difference and nothing is held twice. While `with fused():` runs,
the first of them computes for all and the others hand out their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from r3.policy.attention import Layout, attend
from r3.rollout.native.ops import How, Lanes, New, Ops, PagedCache, Split

PAGED = "r3_paged"


class Pass(Protocol):
    """One forward's attention: stores the new keys and values, [T, heads, D], and attends. [T, query heads, D]"""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPass:
    """Whole prompts, packed; their keys and values go into these slots of the cache."""

    cache: PagedCache
    slots_T: Tensor
    layout: Layout
    ops: Ops

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor:
        self.ops.store(key, value, layer, self.cache, self.slots_T)
        return attend(query, key, value, self.layout, scale, window=window)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePass:
    """One token of every lane."""

    cache: PagedCache
    lanes: Lanes
    ops: Ops
    split: Split

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor:
        return self.ops.attend(New(query, key, value), layer, self.cache, self.lanes, self.split, How(scale, window))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    r3_pass: Pass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, D] → output [1, T, heads, D]."""
    if r3_pass is None:
        raise Unsupported("does not pass the engine's arguments on to its attention")
    if softcap is not None:
        raise Unsupported("soft-caps its attention (as Gemma 2 does)")
    if s_aux is not None:
        raise Unsupported("has attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = r3_pass(q, k, v, module.layer_idx, scale, sliding_window)
    return out.unsqueeze(0), None


class Unsupported(ValueError):
    """The model's attention is not one this engine knows: the rest of a sentence that begins with the model's name."""


AttentionInterface.register(PAGED, paged_attention)


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
