"""The processes of one training job. With one process every operation is the identity, so the loop needs no branch.

`torchrun` and `accelerate launch` start the same program several times and tell each its rank in the environment. Rank
0 leads, the others serve it (`train/processes.py`). Control messages go over gloo, gradients over NCCL on cards.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from r3.errors import RunError

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
