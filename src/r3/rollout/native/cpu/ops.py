"""A decoding step's operations through the C loops of kernels.c, on a CPU in float32 or bfloat16."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from r3.rollout.native.cache import CacheShape, PagedCache
from r3.rollout.native.cpu.compiler import Unavailable, library
from r3.rollout.native.ops import How, Lanes, New, Split, TorchOps
from r3.rollout.protocol import Sampling

PAGE = 16
"""Tokens per page: one vector of scores; and a prompt's pages are shared by its group sooner when pages are short."""
LARGEST = 512
"""Most dimensions of a head, and most tokens of a page, that the loops have room for."""
VOCABULARY = 256 * 4096
"""Largest vocabulary that they have room for."""


class _Attention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "table", "length", "cosine", "sine")),
        *((name, c_int64) for name in ("lanes", "table_width", "heads", "group", "size", "page", "window")),
        ("scale", c_float),
    ]


class _Draws(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("uniforms", "token", "position", "length", "tokens", "logprobs", "entropies")),
        *((name, c_int64) for name in ("step", "steps", "last_position")),
    ]


_STRIDED = (c_void_p, c_int64, c_int64)
_SIGNATURES = {
    "attend": (POINTER(_Attention), *_STRIDED, *_STRIDED, *_STRIDED, c_void_p, c_int),
    "store": (c_void_p, c_void_p, *_STRIDED, *_STRIDED, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int),
    "normalise": (c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int),
    "gate_mlp": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "draw": (POINTER(_Draws), c_void_p, c_int64, c_int64, c_int64, c_float, c_int, c_int),
}


class CpuOps(TorchOps):
    """Attention over pages, the draw, and what lies between two products; filtered sampling stays in torch."""

    in_sizes = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        loops = library(dtype)
        for name, arguments in _SIGNATURES.items():
            function = getattr(loops, name)
            function.argtypes, function.restype = arguments, None
        self._dtype, self._loops = dtype, loops

    def check(self, shape: CacheShape) -> None:
        """Refuse what the loops cannot do."""
        if shape.dtype != self._dtype:
            raise Unavailable(f"these C loops are for {self._dtype}, not for {shape.dtype}")
        if max(shape.head_size, shape.page) > LARGEST:
            raise Unavailable(f"the C loops take heads of at most {LARGEST} dimensions, not {shape.head_size}")

    def store(self, key: Tensor, value: Tensor, layer: int, cache: PagedCache, slots_T: Tensor) -> None:
        shape = cache.shape
        self._loops.store(
            cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), *_strided(key), *_strided(value),
            slots_T.data_ptr(), len(slots_T), shape.heads, shape.head_size, shape.page, torch.get_num_threads(),
        )  # fmt: skip

    def attend(self, new: New, layer: int, cache: PagedCache, lanes: Lanes, split: Split, how: How) -> Tensor:
        return self.attend_rotated(new, layer, cache, lanes, how, None)

    def attend_rotated(
        self, new: New, layer: int, cache: PagedCache, lanes: Lanes, how: How, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The same for queries and keys that the rotary embedding, (cosine, sine), [lanes, D], is still to turn."""
        n, queries, size = new.query.shape
        heads = cache.shape.heads
        out = torch.empty(n, queries, size, dtype=self._dtype)
        step = _Attention(
            cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), lanes.table.data_ptr(),
            lanes.length.data_ptr(), *((x.data_ptr() for x in rotary) if rotary else (None, None)),
            n, lanes.table.stride(0), heads, queries // heads, size, cache.shape.page, how.window or 0, how.scale,
        )  # fmt: skip
        self._loops.attend(
            ctypes.byref(step), *_strided(new.query), *_strided(new.key), *_strided(new.value), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def draw(self, logits: Tensor, lanes: Lanes, sampling: Sampling, last_position: int) -> None:
        filtered = sampling.top_k > 0 or sampling.top_p < 1
        if filtered or logits.dtype != self._dtype or logits.stride(1) != 1 or logits.shape[1] > VOCABULARY:
            super().draw(logits, lanes, sampling, last_position)
            return
        greedy = sampling.temperature == 0
        written = (lanes.uniforms, lanes.token, lanes.position, lanes.length, lanes.tokens, lanes.logprobs)
        draws = _Draws(
            *(x.data_ptr() for x in (*written, lanes.entropies)), int(lanes.step), lanes.tokens.stride(0), last_position
        )
        self._loops.draw(
            ctypes.byref(draws), logits.data_ptr(), len(logits), logits.stride(0), logits.shape[1],
            1.0 if greedy else sampling.temperature, greedy, torch.get_num_threads(),
        )  # fmt: skip

    def normalise(self, x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
        """Root-mean-square normalisation of each row of x, after `added` was added to it in place."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._loops.normalise(
            x.data_ptr(), None if added is None else added.data_ptr(), weight.data_ptr(), eps, out.data_ptr(),
            x.numel() // size, size, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gate_mlp(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, in the memory of `gate`."""
        rows = gate.numel() // gate.shape[-1]
        self._loops.gate_mlp(gate.data_ptr(), up.data_ptr(), rows, gate.shape[-1], torch.get_num_threads())
        return gate


def _strided(x: Tensor) -> tuple[int, int, int]:
    """Where [rows, heads, D] lies; D must be contiguous."""
    rows, heads, along = x.stride()
    assert along == 1
    return x.data_ptr(), rows, heads
