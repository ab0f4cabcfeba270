"""The viewer, serving in threads of its own: for `r3 view` and for notebooks."""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from r3.view.api import Api
from r3.view.probes import ViewedProbe
from r3.view.runs import Indexer, ViewedRun
from r3.view.server import open_server


class Viewer:
    """Serves runs, and probes beside them, until it is closed; `url` is what to open."""

    def __init__(
        self,
        runs: Sequence[ViewedRun],
        probes: Sequence[ViewedProbe] = (),
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        api = Api(runs, probes)
        self._server = open_server(api, host, port)
        self.url = self._server.url
        self.private = self._server.token is None
        """Whether it answers to this machine alone."""
        for run in runs:
            run.refresh()  # the curves come first
        self._indexer = Indexer(runs, lambda: api.asked)
        self._serving = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="r3-view", daemon=True
        )
        self._serving.start()
        self._indexer.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._serving.join()
        self._indexer.stop()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Viewer({self.url!r})"

    def _repr_html_(self) -> str:
        """In a notebook: a link, as the page refuses to be shown inside another."""
        url = html.escape(self.url, quote=True)
        return f'<a href="{url}" target="_blank" rel="noopener">{url}</a>'
