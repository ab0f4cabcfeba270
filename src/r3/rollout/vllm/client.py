"""One vLLM server, asked over its own HTTP API."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from r3.rollout import Request, Response, Sampling
from r3.rollout.vllm import check_version, finish_of, sampling_parameters
from r3.rollout.vllm.weights import EXTENSION

OLDEST_SERVER = (0, 32)
"""The first that says of every token which weights drew it."""
START = "python -m r3.rollout.vllm.serve MODEL --port PORT"


class Lost(Exception):
    """A server that does not answer, or not with what it was asked for: it may be on its way back."""


class Broken(Lost):
    """A server that says that it could not do what it was asked to: it may be dying, or it never can."""


class Refused(Exception):
    """A server that will never do what it was asked to."""


class Client:
    """A server's address. Calls may come from several threads."""

    def __init__(self, address: str, patience: float) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None
        self.address, self.host, self.port = address, parts.hostname, parts.port or 80
        self.patience = patience
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def check(self, shape: Mapping[str, Any]) -> None:
        """Refuse a server that cannot do what is needed for a model of this shape, before a run starts."""
        try:
            check_version(str(self._call("GET", "/version", timeout=30)["version"]), OLDEST_SERVER)
            info = self._call("GET", "/server_info?config_format=json", timeout=60)["vllm_config"]
            self._call("POST", "/inference/v1/generate", {}, timeout=30, expected=(400, 422))
            extension = info["parallel_config"]["worker_extension_cls"]
            mode = info["model_config"]["logprobs_mode"]
        except (Lost, Refused, ValueError) as error:
            raise ValueError(f"{self.address}: {error}; start it with: {START}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.address}: it is not a vLLM server that we know; start one with: {START}"
            ) from error
        if extension != EXTENSION or mode != "processed_logprobs":
            raise ValueError(
                f"{self.address}: it runs with worker_extension_cls={extension or 'none'} and logprobs_mode={mode}, so "
                f"it could not take weights or would measure other log-probs; start it with: {START}"
            )
        self._check_shape(shape)

    def _check_shape(self, shape: Mapping[str, Any]) -> None:
        served = self._call("POST", "/collective_rpc", {"method": "r3_shape"}, timeout=60)["results"][0]
        other = [
            f"{name} {served.get(name)} instead of {value}"
            for name, value in shape.items()
            if served.get(name) != value
        ]
        if other:
            raise ValueError(f"{self.address}: it serves another model than model.path ({', '.join(other)})")

    def local_address(self) -> str:
        """Our own address as this server's machine reaches it."""
        try:
            with socket.create_connection((self.host, self.port), timeout=10) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise Lost(_reason(error)) from error

    def load(self, url: str, version: str) -> None:
        """Have it fetch the weights from there; what it generated under older ones is forgotten."""
        self._call("POST", "/pause?mode=abort", timeout=60)
        self._call("POST", "/collective_rpc", {"method": "r3_fetch", "args": [url]}, timeout=self.patience)
        self._call("POST", "/reset_prefix_cache", timeout=60)
        self._call("POST", "/update_weight_version", {"new_version": version}, timeout=60)
        self._call("POST", "/resume", timeout=60)

    def generate(self, request: Request, number: int, index: int, sampling: Sampling, version: str) -> Response:
        """One response, drawn from the weights of this version and no others."""
        body = {"token_ids": request.prompt.tolist(), "sampling_params": sampling_parameters(request, index, sampling)}
        answer = self._call("POST", "/inference/v1/generate", body, timeout=self.patience)
        choice = answer["choices"][0]
        drawn_by = {span["version"] for span in choice["weight_versions"] or ()}
        if choice["finish_reason"] == "abort":
            raise Lost("it gave a response up")
        if drawn_by != {version}:
            raise Lost("it has other weights: it was restarted, or another run uses it")
        tokens = np.array(choice["token_ids"], np.int32)
        logprobs = np.array([at["logprob"] for at in choice["logprobs"]["content"]], np.float32)
        return Response(number, index, tokens, logprobs, None, finish_of(choice["finish_reason"], tokens, logprobs))

    def drop(self) -> None:
        """End every call that is under way; vLLM gives up the requests of a client that hangs up."""
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):  # it may be closed already
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        expected: tuple[int, ...] = (200,),
    ) -> Any:
        """A connection of its own: one kept open is closed by the server after some idle seconds."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_reason(error)) from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if answer.status not in expected:
            kind = Broken if answer.status >= 500 else Refused
            raise kind(f"{method} {path.partition('?')[0]} gave {answer.status}: {_message(content)}")
        try:
            return json.loads(content) if content else None
        except json.JSONDecodeError as error:
            raise Refused(f"{path.partition('?')[0]} gave no JSON: it is not a vLLM server") from error


def _reason(error: Exception) -> str:
    return f"no answer ({str(error) or type(error).__name__})"


def _message(content: bytes) -> str:
    """What a server says of an error, on one line."""
    text = content.decode(errors="replace")
    try:
        given = json.loads(text)
        text = str(given.get("error", given).get("message", given)) if isinstance(given, dict) else text
    except (json.JSONDecodeError, AttributeError):
        pass
    return " ".join(text.split())[:300]
