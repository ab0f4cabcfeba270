"""A decoding step on a CPU: kernels.c compiled, its loops as operations, and Llama's step written out between them.

The machine's own C compiler compiles kernels.c, and the library is kept on disk. The file needs no headers but those of
C, so that this takes a second. Threads are those of torch: the library has no OpenMP runtime of its own and finds
torch's, which it then shares instead of competing with it.

`CpuOps` calls the loops, in float32 or bfloat16. `LlamaStep` is a step of Llama, Qwen2 and Qwen3: seven products per
layer and three loops between them. The modules' own forward takes some thirty-five operations per layer, most of which
only move memory, and a lot of Python. The engine's check against the model's own forward covers this one too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # brings the OpenMP runtime
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from r3.policy.layers import available, linear
from r3.rollout import Sampling
from r3.rollout.native.ops import CacheShape, How, Lanes, New, PagedCache, Split, TorchOps

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
NUMBERS = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
"""Types of tensors that the loops can be compiled for, each a library of its own."""
MINUTE = 60


class Unavailable(ValueError):
    """Why the loops cannot be had on this machine."""


def folder() -> Path:
    """Where compiled libraries are kept: R3_CACHE, or r3 in the user's cache directory."""
    own = os.environ.get("R3_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "r3"


@cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """The loops over tensors of a type, compiled now if they are not there yet."""
    if dtype not in NUMBERS:
        raise Unavailable(f"the C loops take float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the C loops are for Linux on x86-64, not {platform.system()} on {platform.machine()}")
    return _loaded(_compiled((*FLAGS, *NUMBERS[dtype])))


def _compiled(flags: tuple[str, ...]) -> Path:
    """The library for this source, compiler and processor."""
    compiler = next((path for name in ("gcc", "cc") if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc)")
    place = folder()
    made = place / f"kernels-{_digest(compiler, flags)}.so"
    if made.is_file():
        return made
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as work:
            # Whole or not there, whoever else compiles at the same time.
            return _compile(compiler, flags, Path(work)).rename(made)
    except OSError as error:
        raise Unavailable(f"{place} cannot be written to ({error}); set R3_CACHE to a folder that can") from error


def _compile(compiler: str, flags: tuple[str, ...], work: Path) -> Path:
    object_file, made = str(work / "kernels.o"), work / "kernels.so"
    _run([compiler, *flags, "-c", str(SOURCE), "-o", object_file])
    _run([compiler, "-shared", object_file, "-o", str(made), "-lm"])  # without -fopenmp: the runtime is torch's
    return made


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run ({type(error).__name__})") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{command[0]} cannot compile its loops ({reason})")
    return done.stdout


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """One name per source, flags, compiler and kind of processor: a home directory may be shared by several."""
    texts = [" ".join(flags), _run([compiler, "--version"]), _processor()]
    return hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *(text.encode() for text in texts)])).hexdigest()[:20]


def _processor() -> str:
    """Model and instruction set, as -march=native sees them."""
    wanted = ("vendor_id", "cpu family", "model", "flags")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error})") from error


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


KNOWN = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on how long the longest row is."""


def knows(model: PreTrainedModel) -> bool:
    """Whether `LlamaStep` computes what this model does: its own classes, no adapters, nothing hooked in."""
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model) not in KNOWN or config.hidden_act not in ("silu", "swish") or rotary not in ROTARY:
        return False
    modules = [*model.model.layers.modules(), model.model.norm, model.lm_head]
    own = all(type(module).__module__ == type(model).__module__ for module in modules if not _common(module))
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return own and not hooked and available()


def _common(module: nn.Module) -> bool:
    """torch's own linear layer, or a container or activation, which are transformers'."""
    return type(module) in (nn.Linear, nn.ModuleList) or not list(module.parameters())


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The modules of a layer; their parameters are looked up at each step, since an update may put others there."""

    norm: Any
    attention: Any
    mlp_norm: Any
    mlp: Any


class LlamaStep:
    """One step of the model over a paged cache: the logits that follow each lane's newest token."""

    def __init__(self, model: PreTrainedModel, ops: CpuOps) -> None:
        self._model, self._ops = model, ops
        self._layers = [
            _Layer(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
            for layer in model.model.layers
        ]

    def __call__(self, lanes: Lanes, cache: PagedCache) -> Tensor:
        decoder, ops = self._model.model, self._ops
        x = torch.nn.functional.embedding(lanes.token, decoder.embed_tokens.weight)
        cosine, sine = decoder.rotary_emb(x, lanes.position[None])
        rotary = cosine[0].contiguous(), sine[0].contiguous()
        added: Tensor | None = None
        for number, layer in enumerate(self._layers):
            normed = self._norm(layer.norm, x, added)
            attended = self._attend(layer.attention, normed, number, cache, lanes, rotary)
            normed = self._norm(layer.mlp_norm, x, linear(layer.attention.o_proj, attended))
            gated = ops.gate_mlp(linear(layer.mlp.gate_proj, normed), linear(layer.mlp.up_proj, normed))
            added = linear(layer.mlp.down_proj, gated)
        return linear(self._model.lm_head, self._norm(decoder.norm, x, added))

    def _norm(self, norm: Any, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self._ops.normalise(x, norm.weight, norm.variance_epsilon, added)

    def _attend(
        self, attention: Any, x: Tensor, number: int, cache: PagedCache, lanes: Lanes, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        n, size = len(x), attention.head_dim
        query, key, value = (
            linear(layer, x).view(n, -1, size) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if (norm := getattr(attention, "q_norm", None)) is not None:
            query, key = self._norm(norm, query), self._norm(attention.k_norm, key)
        how = How(attention.scaling, getattr(attention, "sliding_window", None))
        return self._ops.attend_rotated(New(query, key, value), number, cache, lanes, how, rotary).view(n, -1)
