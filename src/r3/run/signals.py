"""Ctrl-C, SIGTERM and SIGHUP ask for an orderly end: the step is finished and a checkpoint written.

A second Ctrl-C stops at once. A hang-up (a closed terminal) that was ignored, as under nohup, stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Self

FINISHING = "finishing this step, then writing a checkpoint; press Ctrl-C again to stop at once"


class StopRequested:
    """True inside its `with` block once SIGINT, SIGTERM or SIGHUP has arrived; check it after each step.

        with StopRequested() as stop:
            for step in steps:
                ...
                if stop:
                    break

    Python delivers signals to the main thread only: in other threads it stays false and changes no handler. With
    `last_words`, SIGTERM is ignored after an error has ended the block: a launcher sends it to every process once one
    has died, which must not cut off the others' error messages.
    """

    def __init__(self, *, last_words: bool = False) -> None:
        self._last_words = last_words
        self.name: str | None = None
        """The signal that came first, e.g. 'SIGTERM'."""
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.name is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            _active.add(self)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and self._last_words and self._old:
            self._old[signal.SIGTERM] = signal.SIG_IGN
        self._restore()

    def _restore(self) -> None:
        _active.discard(self)
        for number, handler in self._old.items():
            # None: a handler that was not set from Python and cannot be restored from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            # Not print: a handler may run in the middle of one, and buffered files refuse to be re-entered.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self.name}: {FINISHING}\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


_active: weakref.WeakSet[StopRequested] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Give forked workers their old handlers back: only the trainer itself stops in an orderly way."""
    for stop in list(_active):
        stop._restore()


os.register_at_fork(after_in_child=_leave_to_parent)
