"""A run's progress: a live display in a terminal, one plain line per step in a pipe or a file.

The caller maps labels to metric keys. A stream that goes away (a closed pipe, a lost terminal) ends the display, never
the training.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TextIO

log = logging.getLogger(__name__)

TREND_STEPS = 60
"""How many steps a trend shows, where the terminal is wide enough."""
_ETA_STEPS = 20
"""How many steps the remaining time is estimated from: enough to be steady, few enough to follow longer answers."""


class Progress:
    """Shows the progress of a run, step by step.

    `shown` maps labels to metric keys; `trends` names the labels that get a small curve, `past` fills these with the
    steps before a resume. Use it as a context manager, so that the terminal is restored.
    """

    def __init__(
        self,
        total: int,
        shown: Mapping[str, str],
        *,
        trends: Sequence[str] = ("accuracy", "solve none"),
        past: Iterable[Mapping[str, Any]] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.step = 0
        self.doing = ""
        self.values: dict[str, float] = {}
        self.trends: dict[str, deque[float]] = {name: deque(maxlen=TREND_STEPS) for name in trends if name in shown}
        self._shown = dict(shown)
        self._clock = clock
        self._times = deque([clock()], maxlen=_ETA_STEPS + 1)
        for metrics in past:
            self._take(metrics)
        self._stream = stream if stream is not None else sys.stdout
        self._screen: _Screen = _NoScreen()
        with self._watched():
            self._screen = _screen_for(self._stream)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step that is done."""
        self.step, self.doing = step, ""
        self._times.append(self._clock())
        self._take(metrics)
        with self._watched():
            self._screen.step(self)

    def phase(self, doing: str) -> None:
        """Say what the step in progress is busy with; only the live display shows it."""
        self.doing = doing
        with self._watched():
            self._screen.phase(self)

    def say(self, text: str) -> None:
        """Print a line of text among the steps, above the live display."""
        with self._watched():
            self._screen.say(text)

    def close(self) -> None:
        with self._watched():
            self._screen.close()
        self._screen = _NoScreen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def eta(self) -> float | None:
        """Estimated seconds left, at the pace of the last steps; None before the first."""
        if len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return pace * max(self.total - self.step, 0)

    def cells(self, missing: str) -> list[tuple[str, str]]:
        """Labels and values, as both displays show them."""
        eta = missing if self.eta is None else format_seconds(self.eta)
        values = [(label, format_value(self.values.get(label, math.nan), missing)) for label in self._shown]
        return [("step", f"{self.step}/{self.total}"), ("eta", eta), *values]

    def _take(self, metrics: Mapping[str, Any]) -> None:
        self.values = {label: _number(metrics.get(key)) for label, key in self._shown.items()}
        for label, trend in self.trends.items():
            trend.append(self.values[label])

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Stop drawing at the first sign that the stream is gone."""
        try:
            yield
        except OSError as error:
            self._give_up(str(error))
        except ValueError as error:
            if not self._stream.closed:
                raise
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        # What is still buffered, and Python's own flush at exit, must not fail again.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        with contextlib.suppress(OSError, ValueError):
            self._screen.close()
        self._screen = _NoScreen()
        log.warning("the progress display is off, as its output is gone (%s); the run goes on", reason)


class _Screen(Protocol):
    def step(self, progress: Progress) -> None: ...

    def phase(self, progress: Progress) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def _screen_for(stream: TextIO | None) -> _Screen:
    if stream is None:  # a process without a standard output
        return _NoScreen()
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from r3.run.live import LiveScreen  # rich is not needed, nor loaded, in a pipe

        return LiveScreen(stream)
    return _PlainScreen(stream)


class _NoScreen:
    def step(self, progress: Progress) -> None:
        pass

    phase = step

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _PlainScreen:
    """One line per step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def step(self, progress: Progress) -> None:
        self.say("  ".join(f"{label} {value}" for label, value in progress.cells(missing="-")))

    def phase(self, progress: Progress) -> None:
        pass

    def say(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def _number(value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, int | float) else math.nan


def format_value(value: float, missing: str = "-") -> str:
    """
    >>> [format_value(value) for value in (0.12345, 12345.6, 13.083, -3.0, 2e-6, float("nan"), float("inf"))]
    ['0.123', '12,346', '13.1', '-3.000', '2.0e-06', '-', 'inf']
    """
    if math.isnan(value):
        return missing
    size = abs(value)
    if 0 < size < 0.0005:  # a learning rate is not 0.000
        return f"{value:.1e}"
    if size < 10 or math.isinf(value):
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def format_seconds(seconds: float) -> str:
    """
    >>> [format_seconds(seconds) for seconds in (7.4, 200, 7500, 200_000)]
    ['7s', '3m 20s', '2h 05m', '2d 07h']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def sparkline(values: Iterable[float], levels: str) -> str:
    """One character per value, scaled from the lowest to the highest; a space for NaN.

    >>> sparkline([0.0, 0.5, float("nan"), 1.0], "abc")
    'ab c'
    """
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
