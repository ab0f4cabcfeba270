"""The processes of one training job. With one process every operation is the identity, so the loop needs no branch.

`torchrun` and `accelerate launch` start the same program several times and tell each its rank in the environment. Rank
0 leads, the others serve it (`train/processes.py`). Control messages go over gloo, gradients over NCCL on cards.

With `train.shard` the trained copy of the policy is split over the processes by FSDP2 (`ShardedPolicy`,
`ShardedOptimiser`).

Every process keeps the whole policy in its own type (bfloat16 on cards): rollouts, log-probs and entropies need no
exchange, and the engine's captured graphs stay valid. What training adds, the float32 masters, gradients and both
moments (16 bytes per parameter), exists once over all processes: a second copy of the model, whose layers are gathered
in the policy's type when the update reaches them and freed again. After an optimiser step the masters are rounded into
the whole policy. Gradients are summed, not averaged: a sample's weight holds the denominators of the whole batch.
"""

from __future__ import annotations

import copy
import datetime
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from r3.errors import RunError
from r3.policy import OptimiserSettings
from r3.policy.layers import layers_of
from r3.policy.model import Policy, TokenStatistics
from r3.policy.optimiser import Optimiser
from r3.policy.packing import Trajectory

BUCKET = 2**26
"""How many numbers are sent at a time: 256 MB in float32."""
# A process may wait for another's longest rollout or evaluation; one that died is noticed by its closed connection.
PATIENCE = datetime.timedelta(days=7)
WORD = 30.0
"""After this many seconds of waiting the first process logs it."""
log = logging.getLogger(__name__)


class World:
    """The processes that take part, and communication between them."""

    def __init__(self, rank: int = 0, size: int = 1, messages: Any = None) -> None:
        self.rank, self.size = rank, size
        self._messages = messages

    @classmethod
    def join(cls, device: str) -> World:
        """The world that the launcher's environment describes; a world of one without a launcher."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), size, dist.new_group(backend="gloo", timeout=PATIENCE))

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, at every rank."""
        if self.size == 1:
            return value
        box = [value]
        with _connected(self.rank):
            dist.broadcast_object_list(box, src=0, group=self._messages)
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value by rank, at rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _connected(self.rank):
            dist.gather_object(value, values, dst=0, group=self._messages)
        return values

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; all must have the same ones in the same order."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = _flatten_dense_tensors(bucket)
            with _connected(self.rank):
                dist.all_reduce(flat)
            for tensor, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(total)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work with exchanges that are not ours (FSDP's): a broken connection says what it means."""
        try:
            yield
        except RuntimeError as error:
            if self.size > 1 and _is_broken_connection(error):
                raise _gone(error) from error
            raise

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(map(Tensor.numel, bucket)) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _say_waiting() -> None:
    log.warning(
        "still waiting for another process of this job after %d s: it may have more to do, or be stopped (kill -CONT "
        "lets it go on); its own output says more",
        WORD,
    )


class _connected:
    """Turn a broken connection into an error that says what it means: another process has died."""

    def __init__(self, rank: int) -> None:
        # Only the first process logs this: the others wait for its orders, however long it evaluates.
        self._timer = threading.Timer(WORD, _say_waiting) if rank == 0 else None

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, RuntimeError) and not isinstance(error, RunError):
            raise _gone(error) from error


def _gone(error: RuntimeError) -> RunError:
    first = str(error).strip().split("\n")[0]
    return RunError(
        f"another process of this job is gone ({first}); its own message says why. Start the job again with "
        "--resume: it goes on from the last checkpoint, with any number of processes"
    )


def _is_broken_connection(error: RuntimeError) -> bool:
    """Whether it is NCCL's or gloo's way to say so, and not one of the many other errors that torch calls the same."""
    return not isinstance(error, RunError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


# ------------------------------------------------------ the trained copy, split


class ShardedPolicy(Policy):
    """A float32 copy of a policy, of which each process holds a part. All processes must make every call together."""

    def __init__(self, whole: Policy, world: World) -> None:
        self.world, base = world, _without_weights(whole.base)
        with world.together():
            self._root = _shard(base, whole.base, world.size)
        super().__init__(base, whole.tokenizer, whole.settings, base=base)
        self.shares_prompts = whole.shares_prompts

    def statistics(self, sequences: Sequence[Trajectory], *, temperature: float) -> TokenStatistics:
        def run() -> tuple[Tensor, Tensor]:
            statistics = super(ShardedPolicy, self).statistics(sequences, temperature=temperature)
            return statistics.logprobs_T, statistics.entropies_T

        return TokenStatistics(*self._root(run))

    def join(self, trajectory: Trajectory) -> None:
        """Take part in a forward and backward of the others with a gradient of zero."""
        statistics = self.statistics([Trajectory(trajectory.prompt[-1:], trajectory.response[:1])], temperature=1.0)
        (statistics.logprobs_T.sum() * 0).backward()


class _Whole(nn.Module):
    """A root module whose forward runs any function: FSDP2 gathers parameters only during a module's forward.

    The update calls decoder and head one by one, which share weights in some models; so the root is around both.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return run()


def _without_weights(base: Any) -> Any:
    """A copy of the model, its parameters on the meta device."""
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in base.parameters()}
    return copy.deepcopy(base, memo)


def _shard(base: Any, whole: Any, processes: int) -> nn.Module:
    """Fill the copy in float32 layer by layer and split it, so that at no time more than one layer is there in full."""
    dtype = next(whole.parameters()).dtype
    mesh = init_device_mesh(next(whole.parameters()).device.type, (processes,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    weights = dict(whole.named_parameters(remove_duplicate=False))
    filled: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for layer in layers_of(base):
        _fill(layer, base, weights, filled)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    _fill(base, base, weights, filled)
    root = _Whole(base)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return root


def _fill(module: nn.Module, base: nn.Module, weights: dict[str, Tensor], filled: dict[Tensor, nn.Parameter]) -> None:
    """Give the module's parameters that are still on the meta device their values."""
    prefix = next(name for name, candidate in base.named_modules() if candidate is module)
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in filled:
                weight = weights[".".join(part for part in (prefix, path, name) if part)]
                filled[parameter] = nn.Parameter(weight.detach().float().clone(), requires_grad=parameter.requires_grad)
            owner._parameters[name] = filled[parameter]


class ShardedOptimiser(Optimiser):
    """AdamW on each process's part; all processes must call each method together. Its state is like `Optimiser`'s."""

    def __init__(self, sharded: ShardedPolicy, whole: Policy, settings: OptimiserSettings, total_updates: int) -> None:
        super().__init__(sharded.base.parameters(), settings, total_updates)
        self.world = sharded.world
        self.whole = [p for p in whole.base.parameters() if p.requires_grad]
        self.rounds = any(p.dtype != torch.float32 for p in self.whole)
        """Whether the policy is a rounding of the masters, which must then be kept besides."""

    def _clip(self) -> float:
        return float(_full(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.max_grad_norm)))

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in zip(self.whole, self.masters, strict=True):
            parameter.copy_(_full(master.to(parameter.dtype)))

    def state(self) -> dict[str, Any]:
        """The whole state, put together parameter by parameter on the host."""
        adamw = self.adamw.state_dict()
        with self.world.together():
            adamw["state"] = {
                index: {name: _on_host(value) for name, value in moments.items()}
                for index, moments in adamw["state"].items()
            }
            return {"adamw": adamw, "masters": [_on_host(m.detach()) for m in self.masters] if self.rounds else []}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        moments = state["adamw"]["state"]
        with self.world.together():
            parts = {index: dict(_parts(moments[index], self.masters[index])) for index in moments}
            self.adamw.load_state_dict({**state["adamw"], "state": parts})
            for master, saved in zip(self.masters, state["masters"] or self.whole, strict=True):
                master.copy_(_part(saved, master))
            self._write_back()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    return _full(tensor).cpu()


def _part(full: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that every process has."""
    assert isinstance(like, DTensor)
    whole = full.detach().to(device=like.device, dtype=like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _parts(moments: dict[str, Tensor], like: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, value in moments.items():
        yield name, _part(value, like) if value.shape == like.shape else value
