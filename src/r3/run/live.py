"""The live display, drawn with rich. It is redrawn on each call, without a thread: training forks."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from r3.run.display import format_value, sparkline

if TYPE_CHECKING:
    from r3.run.display import Progress

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process; `Progress` ends the display alone."""
        raise  # rich calls this while it handles the BrokenPipeError


class LiveScreen:
    def __init__(self, stream: TextIO) -> None:
        # rich finds out NO_COLOR, the terminal's size and its colours.
        self._console = _Console(file=stream, force_terminal=True, highlight=False, soft_wrap=False)
        self._unicode = self._console.encoding.lower().startswith("utf")
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,
            # Log lines on the same terminal would break up the display.
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start()

    def step(self, progress: Progress) -> None:
        self._live.update(self._drawn(progress), refresh=True)

    phase = step

    def say(self, text: str) -> None:
        encoding = self._console.encoding
        self._console.print(Text(text.encode(encoding, "replace").decode(encoding)))

    def close(self) -> None:
        self._live.stop()

    def _drawn(self, progress: Progress) -> RenderableType:
        missing = "–" if self._unicode else "-"
        cells = [Text.assemble((label, "dim"), " ", (value, "bold")) for label, value in progress.cells(missing)]
        if progress.doing:
            cells.append(Text(progress.doing, "italic"))
        # An empty padding ends the line after the bar, which the bar itself does not.
        bar = Padding(ProgressBar(total=max(progress.total, 1), completed=progress.step), 0)
        return Group(bar, Columns(cells, padding=(0, 2)), *self._trends(progress, missing))

    def _trends(self, progress: Progress, missing: str) -> list[Text]:
        longest = max(map(len, progress.trends), default=0)
        lines = []
        for label, trend in progress.trends.items():
            latest = format_value(progress.values.get(label, float("nan")), missing)
            room = max(self._console.width - longest - len(latest) - 2, 0)
            newest = islice(trend, max(len(trend) - room, 0), None)
            curve = sparkline(newest, _BLOCKS if self._unicode else _ASCII)
            line = Text.assemble((label.ljust(longest), "dim"), " ", (curve, "cyan"), " ", (latest, "bold"))
            line.no_wrap, line.overflow = True, "crop"
            lines.append(line)
        return lines
