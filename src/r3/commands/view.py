"""`r3 view`: look at runs in a browser, or write them into one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from r3.view.pages import ViewedProbe
    from r3.view.runs import ViewedRun

EPILOG = """\
examples:
  r3 view runs/r3-arithmetic-0                         curves, groups, samples, buffer, in a browser
  r3 view runs/r3-arithmetic-0 runs/grpo-arithmetic-0  the same with the curves of two runs over each other
  r3 view runs/                                        every run in that folder, and every r3 probe
  r3 view probe/                                       what r3 probe --out probe found
  r3 view runs/r3-arithmetic-0 --export report.html    one file that opens anywhere, without a network
  r3 view runs/r3-arithmetic-0 --host 0.0.0.0          for other machines: the address printed holds a token

It reads the run's files only, and may be left open while the run goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `r3 view`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="one run, several to compare, a folder of runs, or an r3 probe",
    )
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    add("--port", type=int, default=None, metavar="N", help="port to listen on (6633, or a free one if that is taken)")
    add("--no-browser", action="store_true", help="do not open a browser")
    add("--export", type=Path, metavar="FILE.html", help="write one self-contained file instead of serving")
    add("--steps", type=int, default=24, metavar="N", help="with --export: steps to include with their groups (24)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve or export; returns the exit code."""
    from r3.view.pages import open_all

    runs, probes = open_all(arguments.runs)
    if arguments.export is not None:
        from r3.view.export import export

        print(export(runs, arguments.export, steps=arguments.steps, probes=probes))
        return 0
    return _serve(arguments, runs, probes)


def _serve(arguments: argparse.Namespace, runs: list[ViewedRun], probes: list[ViewedProbe]) -> int:
    import logging
    import signal
    import threading

    from r3.view.server import Viewer

    logging.basicConfig(level=logging.WARNING, format="r3: %(message)s")
    with Viewer(runs, probes, host=arguments.host, port=arguments.port) as viewer:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: ended.set())
        print(f"r3 view: {viewer.url}", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if not arguments.no_browser and viewer.private:
            _open_browser(viewer.url)
        while not ended.wait(3600):
            pass
    return 0


def _open_browser(url: str) -> None:
    """Open a page where there is a screen; a machine without one just has the address printed."""
    import os
    import webbrowser

    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
