"""Serving the pages, for `r3 view` and for notebooks: GET only, from a fixed list of files and questions.

Against other pages in the same browser and other people on the network: a Host header that is not ours is refused (DNS
rebinding); beyond loopback a random token must come once in the URL and then as a cookie; scripts and styles come from
here alone (Content-Security-Policy without inline code).
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import json
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from r3.errors import NotThere, RunError, ViewError
from r3.view.api import Api
from r3.view.pages import ViewedProbe
from r3.view.runs import Indexer, ViewedRun

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
USUAL_PORT = 6633
MOST_CONNECTIONS = 256
"""Connections served at a time, each by a thread; a browser keeps six."""
BUSY_PATIENCE = 0.1
"""Seconds to wait for the request of a connection that is turned away."""
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 28\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\nr3 view: busy, ask it again\n"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


def static_files() -> dict[str, bytes]:
    """Every file of the page, by its path in URLs. No other file is ever served."""
    root = resources.files("r3.view") / "static"
    files: dict[str, bytes] = {}
    for folder, prefix in ((root, ""), (root / "vendor", "vendor/")):
        for entry in folder.iterdir():
            if entry.is_file() and any(entry.name.endswith(kind) for kind in TYPES):
                files[prefix + entry.name] = entry.read_bytes()
    return files


class ViewServer(ThreadingHTTPServer):
    """Serves an `Api` and the page over it. `url` is what to open."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, api: Api, host: str, port: int) -> None:
        self.api = api
        self.files = static_files()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ViewError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from error
        self.names = _own_names(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread, or say that the server is busy."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.settimeout(BUSY_PATIENCE)
            request.recv(65536)  # if it is left unread, our answer is cut off
            request.sendall(BUSY)
            request.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # gone already
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that failed is a line in the log, not a traceback on the screen."""
        log.warning("a connection from %s failed: %s", client_address, sys.exc_info()[1])

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = socket.gethostname() if host in ("0.0.0.0", "::") else str(host)
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{port}/" + ("" if self.token is None else f"?token={self.token}")

    @property
    def cookie(self) -> str:
        """Named after the port: cookies do not tell ports of a host apart."""
        return f"r3_view_{self.server_address[1]}"

    def knows(self, host: str) -> bool:
        """Whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.names:
                return True
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.token is not None or address.is_loopback


def open_server(api: Api, host: str, port: int | None) -> ViewServer:
    """A server on that port; without one, on the usual port, or on any free one where that is taken."""
    if port is not None:
        return ViewServer(api, host, port)
    try:
        return ViewServer(api, host, USUAL_PORT)
    except ViewError:
        return ViewServer(api, host, 0)


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


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = "r3"
    sys_version = ""
    # Answers are small and written at once: waiting to fill a packet would only delay them.
    disable_nagle_algorithm = True
    timeout = 120

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
            given = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "not a URL")
            return
        if not self.server.knows(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "the Host header names another server")
        elif not self._allowed(given):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address with ?token=… that r3 view printed")
        elif "token" in given and self.server.token is not None:
            self._welcome()
        elif parts.path.startswith("/api/"):
            self._answer(parts.path.removeprefix("/api/"), given)
        else:
            self._file("index.html" if parts.path == "/" else parts.path.removeprefix("/static/"))

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other HTTP method
            return lambda: self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only: GET or HEAD")
        raise AttributeError(name)

    def _allowed(self, given: dict[str, str]) -> bool:
        token = self.server.token
        if token is None:
            return True
        pairs = (entry.strip().partition("=") for entry in self.headers.get("Cookie", "").split(";"))
        shown = [given.get("token", ""), *(value for name, _, value in pairs if name == self.server.cookie)]
        return any(hmac.compare_digest(token.encode(), text.encode("utf-8", "replace")) for text in shown)

    def _welcome(self) -> None:
        """Move the token from the URL, which histories and logs keep, into a cookie."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        self._end(b"", "text/plain")

    def _answer(self, name: str, given: dict[str, str]) -> None:
        status = HTTPStatus.OK
        try:
            answer = self.server.api.answer(name, given)
        except NotThere as error:
            status, answer = HTTPStatus.NOT_FOUND, {"error": str(error)}
        except (RunError, OSError) as error:
            status, answer = HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except Exception as error:  # tell the page and the log, and go on serving
            log.exception("answering %s", name)
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        self.send_response(status)
        self._end(json.dumps(answer, separators=(",", ":")).encode(), "application/json")

    def _file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        self.send_response(HTTPStatus.OK)
        self._end(data, next(kind for suffix, kind in TYPES.items() if name.endswith(suffix)))

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.send_response(status)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.close_connection = True  # the rest of the request is not read
        self._end(f"r3 view: {reason}\n".encode(), "text/plain; charset=utf-8")

    def _end(self, data: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle(self) -> None:
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # a page that was closed

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _own_names(host: str) -> set[str]:
    names = {"localhost", host.lower()}
    return names if is_loopback(host) else names | {socket.gethostname().lower()}
