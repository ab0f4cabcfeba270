"""Training: the loop, the run around it, resuming, records of steps, and the supervised warm start.

Callbacks of `r3.train` are called during a run, and can end it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

STOPPED = "callback"
"""What `Finished.stopped_by` says where a callback ended the run."""


class Callback:
    """Override what you need. Returning True ends the run after a checkpoint, as Ctrl-C does."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """A step is done; `metrics` is its line of metrics.jsonl. Step 0 is the evaluation before training."""

    def on_checkpoint(self, step: int, folder: Path) -> bool | None:
        """A checkpoint was written; `folder / "policy"` loads with from_pretrained."""


AnyCallback = Callback | Callable[[int, Mapping[str, Any]], bool | None]
"""A plain function is called after every step."""


class Callbacks:
    """All callbacks of a run. True once one of them has asked to stop."""

    def __init__(self, callbacks: Sequence[AnyCallback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback) and (isinstance(callback, type) or not callable(callback)):
                raise TypeError(f"{callback!r} is no callback: give a function f(step, metrics) or an r3.Callback")
        self._callbacks = callbacks
        self._stop = False

    def __bool__(self) -> bool:
        return self._stop

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            tell = callback.on_step if isinstance(callback, Callback) else callback
            self._take(callback, tell(step, metrics))

    def checkpoint(self, step: int, folder: Path) -> None:
        for callback in self._callbacks:
            if isinstance(callback, Callback):
                self._take(callback, callback.on_checkpoint(step, folder))

    def _take(self, callback: AnyCallback, answer: Any) -> None:
        """What a function happens to return (`lambda step, metrics: log.append(…)`) must not end a run by chance."""
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise TypeError(f"the callback {callback!r} returned {answer!r}: return True to end the run, else None")
        self._stop = self._stop or bool(answer)


class _CallableModule(ModuleType):
    """`r3.train` is this package and what one calls from Python: Python binds a package's name to the package."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from r3.api import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _CallableModule
